// SPDX-License-Identifier: Apache-2.0
// A manual stream whose timeline outlives it, so that short submissions share points on it as they
// do on CUDA.
//
//   // how many points were recorded so far
//   support::sharing_stream s;    s.enqueue(50us);    s.records();
//   s.manual().reach_all();
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/units.hpp>

#include "support/manual_timeline.hpp"
#include "support/unique_name.hpp"

namespace support {

/// Copies are the same stream.
class sharing_stream {
    struct shared {
        manual_stream manual;
        int records = 0;
        bool captured = false;
        std::uint64_t name = unique_name();
    };

public:
    using point = manual_stream::point;

    class handle {
    public:
        handle() = default;
        explicit operator bool() const noexcept { return of_ != nullptr; }
        [[nodiscard]] point record() const { return record_on(*of_); }

    private:
        friend sharing_stream;
        explicit handle(std::shared_ptr<shared> s) noexcept : of_(std::move(s)) {}
        std::shared_ptr<shared> of_;
    };

    sharing_stream() = default;
    /// A stream on the same device, whose points are reached no earlier than `since`.
    sharing_stream(const sharing_stream& neighbour, gpushare::instant since)
        : shared_(std::make_shared<shared>(shared{manual_stream(neighbour.shared_->manual, {})})) {
        (void)record();
        shared_->manual.reach_next_at(since);
        shared_->records = 0;
    }

    void enqueue(gpushare::ns length) { shared_->manual.enqueue(length); }
    [[nodiscard]] point record() { return record_on(*shared_); }
    [[nodiscard]] handle share() const noexcept { return handle(shared_); }
    [[nodiscard]] std::uint64_t timeline() const noexcept { return shared_->name; }

    [[nodiscard]] int records() const { return shared_->records; }
    manual_stream& manual() { return shared_->manual; }
    void capture(bool on) { shared_->captured = on; }

private:
    static point record_on(shared& s) {
        if (s.captured) throw std::runtime_error("the stream is captured");
        ++s.records;
        return s.manual.record();
    }
    std::shared_ptr<shared> shared_ = std::make_shared<shared>();
};
static_assert(gpushare::shared_timeline<sharing_stream>);

}  // namespace support
