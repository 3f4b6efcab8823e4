// SPDX-License-Identifier: Apache-2.0
// Memory that an engine allocates by itself, without any allocator of the library, as most engines
// do for weights. The meter measures this memory around the load, and charges it to the engine's
// tenant.
//
//   gpushare::foreign_meter before{node.memory(d)};  // on a GPU: by the device's own account
//   auto engine = load(path);
//   log(before.measured());  // bytes so far; charge() starts over
//   auto weights = before.charge(chat);  // throws over_quota: then destroy the engine
//
//   // an engine on the CPU: by the process's own
//   gpushare::foreign_meter on_cpu{gpushare::process_memory{}};
//
// The meter can tell a load from others' allocations only if nothing else is loaded or freed
// meanwhile, so load one engine at a time.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include <unistd.h>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// This process's host memory, as the system counts it (/proc): resident pages, without those of
/// files.
struct process_memory {
    /// A reading. Throws operation_error (io_failed, errno in `asked`) if the system doesn't tell,
    /// or if no file can be opened. A 0 would pass for a reading, and the next reading would then
    /// count all memory of the process.
    [[nodiscard]] static bytes taken() {
        errno = 0;
        std::FILE* const file = std::fopen("/proc/self/statm", "re");
        const auto fail = [](int why) {
            raise({.code = errc::io_failed, .asked = static_cast<std::uint64_t>(why)}, {}, "reading /proc/self/statm");
        };
        if (file == nullptr) fail(errno);
        unsigned long long size = 0, resident = 0, of_files = 0;
        const int found = std::fscanf(file, "%llu %llu %llu", &size, &resident, &of_files);
        const int why = errno;
        (void)std::fclose(file);
        if (found != 3 || resident < of_files) fail(why);
        return bytes{(resident - of_files) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
    }
};

/// Measures the memory taken since its construction.
template <class Source>
class foreign_meter {
    static constexpr bool of_device = memory<Source>;

public:
    /// Measures a device; its memory must outlive the meter.
    explicit foreign_meter(Source& of) noexcept requires of_device : of_(&of), before_(least(of)) {}
    /// Measures the process. Throws as a reading does.
    explicit foreign_meter(const Source&) requires(!of_device) : before_(Source::taken()) {}

    /// The bytes taken since the meter was made, or since charge() was last called. Takes the least
    /// of some readings, so that frees under way don't count as memory. Throws what reading the
    /// process's memory throws.
    [[nodiscard]] bytes measured() const noexcept(of_device) { return now() - before_; }

    /// Charges measured() to a tenant, as long as the result lives; later allocations are measured
    /// separately. On a device this memory no longer counts as overhead. Throws memory_error as an
    /// allocation would, and the errors of measured(), and then nothing is charged.
    template <class Tenant>
    [[nodiscard]] workspace charge(Tenant& to, std::size_t part = 0) {
        const bytes taken = now();
        auto charged = declare(to, taken - before_, part);
        before_ = taken;
        return charged;
    }

private:
    template <class Tenant>
    [[nodiscard]] static workspace declare(Tenant& to, bytes size, std::size_t part) {
        if constexpr (of_device)
            return to.declare_workspace(size, part);
        else
            return to.declare_foreign(size, part);
    }
    [[nodiscard]] bytes now() const noexcept(of_device) {
        if constexpr (of_device)
            return least(*of_);
        else
            return Source::taken();
    }
    static bytes least(const Source& of) noexcept requires of_device {
        bytes taken = of.taken_by_others();
        for (int again = 0; again < 2; ++again) taken = std::min(taken, of.taken_by_others());
        return taken;
    }

    const Source* of_ = nullptr;
    bytes before_;
};

/// Measures a device.
template <memory Memory>
foreign_meter(Memory&) -> foreign_meter<Memory>;
/// Measures the process.
foreign_meter(process_memory)->foreign_meter<process_memory>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
