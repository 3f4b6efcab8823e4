// SPDX-License-Identifier: Apache-2.0
// A host node that reveals only as much about its streams as a GPU: the time at which a point was
// reached, but not the use of the SMs. Benchmarks take the true use from the node's own ledger,
// which the library can't see.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/detail/gang_residents.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace bench {

/// A host stream whose points have times but no SM usage.
class silent_stream {
public:
    class point {
    public:
        point() = default;
        explicit point(gpushare::host::point p) noexcept : inner_(std::move(p)) {}
        [[nodiscard]] bool reached() const noexcept { return inner_.reached(); }
        bool wait(gpushare::instant deadline) const { return inner_.wait(deadline); }
        static bool wait_any(std::span<const point> points, gpushare::instant deadline) {
            std::vector<gpushare::host::point> inner;
            for (const auto& p : points) inner.push_back(p.inner_);
            return gpushare::host::point::wait_any(inner, deadline);
        }
        [[nodiscard]] gpushare::errc status() const noexcept { return inner_.status(); }
        friend gpushare::ns elapsed(const point& a, const point& b) noexcept { return elapsed(a.inner_, b.inner_); }
        [[nodiscard]] const gpushare::host::point& inner() const noexcept { return inner_; }

    private:
        gpushare::host::point inner_;
    };

    explicit silent_stream(gpushare::host::stream s) : inner_(std::move(s)) {}
    [[nodiscard]] point record() { return point(inner_.record()); }
    void wait(const point& p) { inner_.wait(p.inner()); }
    [[nodiscard]] gpushare::host::stream& inner() noexcept { return inner_; }

private:
    gpushare::host::stream inner_;
};
static_assert(gpushare::joining_timeline<silent_stream> && !gpushare::sm_timeline<silent_stream>);

/// A host node with such streams.
class silent_node {
public:
    using stream = silent_stream;
    using memory_type = gpushare::host::node::memory_type;

    explicit silent_node(const gpushare::host::node_options& o) : inner_(o), gangs_(o.devices) {}
    [[nodiscard]] std::uint32_t num_devices() const noexcept { return inner_.num_devices(); }
    [[nodiscard]] memory_type& memory(gpushare::device_id d) { return inner_.memory(d); }
    [[nodiscard]] stream make_stream(gpushare::device_id d, gpushare::priority level = {}, std::uint32_t tag = 0) {
        return stream(inner_.make_stream(d, level, tag));
    }
    [[nodiscard]] auto get_clock() const noexcept { return inner_.get_clock(); }
    [[nodiscard]] auto& gangs() noexcept { return gangs_; }
    [[nodiscard]] gpushare::host::ledger& ledger(gpushare::device_id d) { return inner_.ledger(d); }

private:
    gpushare::host::node inner_;
    gpushare::detail::gang_residents<silent_stream::point> gangs_;
};
static_assert(gpushare::node<silent_node>);

}  // namespace bench
