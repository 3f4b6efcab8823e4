// SPDX-License-Identifier: Apache-2.0
// A resource whose blocks are overwritten before they go back to its upstream: what a tenant frees can be given to the
// next one as it is. In stream order, and nobody waits.
//
//   gpushare::scrubbing_resource mine{pool, stream};     // pool: shared by tenants; stream: fills with zeros
//   void* p = mine.allocate(1 << 20, 256);
//   mine.deallocate_after(kernels.record(), p, 1 << 20, 256);
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <span>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/ask_upstream.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Reached once the scrubbing before it has succeeded: never, if it failed.
template <timeline_point Point>
struct scrubbed_point {
    Point end{};
    bool scrubs = false;

    [[nodiscard]] bool reached() const noexcept { return end.reached() && good(); }
    bool wait(instant deadline) const { return end.wait(deadline) && good(); }
    static bool wait_any(std::span<const scrubbed_point> points, instant deadline) {
        return std::ranges::any_of(points, &scrubbed_point::reached) ||
               std::ranges::any_of(points, [&](const scrubbed_point& p) { return p.wait(deadline); });
    }
    [[nodiscard]] errc status() const noexcept { return end.status(); }
    friend ns elapsed(const scrubbed_point& a, const scrubbed_point& b) noexcept { return elapsed(a.end, b.end); }

private:
    [[nodiscard]] bool good() const noexcept { return !scrubs || end.status() == errc::none; }
};
static_assert(timeline_point<scrubbed_point<immediate_point>>);

}  // namespace detail

/// Refers to an upstream and a stream, which must outlive it. Blocks carry no mark of who had them, so scrub_policy::
/// on_hand_over means on_free here: whoever is next may be another tenant. The upstream isn't asked whether a free is
/// right before the block is overwritten: put this below what checks (tenant_memory, handle_resource).
/// Thread-safe if upstream and stream are. drain() before it is destroyed: what is pending then isn't given back.
template <memory_resource Upstream, scrubber Stream>
class scrubbing_resource {
public:
    using point = typename Stream::point;

    scrubbing_resource(Upstream& upstream, Stream& stream, scrub_policy policy = scrub_policy::on_free) noexcept
        : upstream_(&upstream), stream_(&stream), policy_(policy), frees_(upstream) {}

    /// From the upstream. If it refuses, again whenever blocks that were scrubbed are back there.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment = alignof(std::max_align_t)) {
        for (auto seen = frees_.returned();;) {
            try {
                return upstream_->allocate(size, alignment);
            } catch (const std::bad_alloc&) {
                if (!frees_.settle(seen)) throw;
            }
        }
    }

    /// The same, null instead of an exception.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        for (auto seen = frees_.returned();;) {
            void* const p = ask_upstream(*upstream_, size, alignment);
            if (p != nullptr || !frees_.settle(seen)) return p;
        }
    }

    /// No work may use the block any more. It is back in the upstream once it is scrubbed. Null is ignored.
    /// submission_failed if the stream takes no work. Then, and where the scrubbing fails later, the block is lost to all
    /// rather than shown to somebody.
    errc deallocate(void* p, std::size_t size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return free_after(nullptr, p, size, alignment);
    }
    /// The same for a block that work before `used` may still use.
    errc deallocate_after(const point& used, void* p, std::size_t size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return free_after(&used, p, size, alignment);
    }

    /// Gives back what is scrubbed by now. Never blocks on the stream.
    void collect() noexcept { frees_.collect(); }
    /// Waits for all of it. False at the deadline, or if some couldn't be scrubbed.
    bool drain(instant deadline) { return frees_.drain(deadline); }

    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return charged_by(*upstream_, size, alignment);
    }
    [[nodiscard]] bytes pending() const noexcept { return frees_.pending(); }
    [[nodiscard]] Upstream& upstream() const noexcept { return *upstream_; }

private:
    errc free_after(const point* used, void* p, std::size_t size, std::size_t alignment) noexcept {
        if (p == nullptr) return errc::none;
        try {
            if (policy_ == scrub_policy::off) {
                frees_.add({.end = used != nullptr ? *used : point{}}, p, size, alignment);
                return errc::none;
            }
            if (used != nullptr) stream_->wait(*used);
            if (size != 0) stream_->fill(p, std::byte{0}, size);
            frees_.add({.end = stream_->record(), .scrubs = true}, p, size, alignment);
            return errc::none;
        } catch (...) {
            return errc::submission_failed;
        }
    }

    Upstream* upstream_;
    Stream* stream_;
    scrub_policy policy_;
    deferred_frees<detail::scrubbed_point<point>, Upstream> frees_;
};

static_assert(memory_resource<scrubbing_resource<detail::archetype_resource, host_scrubber<immediate_point>>>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
