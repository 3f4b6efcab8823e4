// SPDX-License-Identifier: Apache-2.0
// A resource that overwrites freed blocks before they go back to its upstream, so that the next
// tenant can use them as they are. The overwriting is in stream order, and no thread waits for it.
//
//   // pool: shared by tenants; stream: fills with zeros
//   gpushare::scrubbing_resource mine{pool, stream};
//   void* p = mine.allocate(1_MiB, 256);
//   mine.deallocate_after(kernels.record(), p, 1_MiB, 256);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/detail/call_gate.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// A point that is reached once the scrubbing before it has succeeded. After a failure it is never
/// reached.
template <timeline_point Point, class Outcome = no_own_work::outcome>
struct scrubbed_point {
    Point end{};
    bool scrubs = false;
    [[no_unique_address]] Outcome scrubbing{};

    [[nodiscard]] bool reached() const noexcept { return end.reached() && good(); }
    /// Whether it is never reached, since the scrubbing has failed.
    [[nodiscard]] bool is_lost() const noexcept { return end.reached() && !good(); }
    bool wait(instant deadline) const { return end.wait(deadline) && good(); }
    static bool wait_any(std::span<const scrubbed_point> points, instant deadline) {
        for (std::vector<Point> open;; open.clear()) {
            for (const scrubbed_point& p : points)
                if (!p.end.reached())
                    open.push_back(p.end);
                else if (p.good())
                    return true;
            if (open.empty()) return false;
            if (!Point::wait_any(open, deadline)) return std::ranges::any_of(points, &scrubbed_point::reached);
        }
    }
    [[nodiscard]] errc status() const noexcept { return status_of(scrubbing, end); }
    friend ns elapsed(const scrubbed_point& a, const scrubbed_point& b) noexcept { return elapsed(a.end, b.end); }

private:
    [[nodiscard]] bool good() const noexcept { return !scrubs || status() == errc::none; }
};
static_assert(timeline_point<scrubbed_point<immediate_point>>);

}  // namespace detail

/// An allocator that overwrites freed blocks. Refers to an upstream and a stream, which must
/// outlive it. The resource doesn't know who had a block before, and the next owner may be another
/// tenant, so scrub_policy::on_hand_over means on_free here. It overwrites a block before the free
/// is checked, so put it below a resource that checks (tenant_memory, handle_resource). A quota
/// above it is credited once the block is back in the upstream, so a block that is still being
/// scrubbed never takes room that is guaranteed to others. Thread-safe if upstream and stream are.
/// Call drain() before you destroy the resource: the destructor doesn't give pending blocks back.
template <memory_resource Upstream, scrubber Stream>
class scrubbing_resource {
public:
    /// The point that `Stream` records.
    using point = typename Stream::point;

    /// Over `upstream`; `stream` overwrites.
    scrubbing_resource(Upstream& upstream, Stream& stream, scrub_policy policy = scrub_policy::on_free)
        : upstream_(upstream), stream_(&stream), policy_(policy), frees_(upstream) {
        closes_.emplace(upstream_.closing(), [this](instant deadline) { return close(deadline); });
    }
    scrubbing_resource(const scrubbing_resource&) = delete;
    scrubbing_resource& operator=(const scrubbing_resource&) = delete;

    /// Allocates from the upstream. After a refusal, tries again as scrubbed blocks come back to
    /// the upstream.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t)) {
        upstream_refusal r{.why = {.code = errc::out_of_memory, .asked = size}};
        if (void* const p = obtain(size, alignment, r)) return p;
        if (r.thrown) std::rethrow_exception(r.thrown);
        throw memory_error(r.why, owner(), "allocate");
    }
    /// The same, null instead of an exception; `why`, unless it is null, gets the reason.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = alignof(std::max_align_t),
                                     failure* why = nullptr) noexcept {
        upstream_refusal r{.why = {.code = errc::out_of_memory, .asked = size}};
        void* const p = obtain(size, alignment, r);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }

    /// As allocate, but waits for memory until the deadline or stop request of `until`: tries again
    /// as blocks are scrubbed, and at least every two milliseconds, since an upstream doesn't tell
    /// when it has memory again. A caller that waits here has no place in a queue below. Afterwards
    /// it throws memory_error: deadline_exceeded or stopped. A request that can never be granted
    /// throws immediately, with its own code.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until) {
        upstream_refusal r{.why = {.code = errc::out_of_memory, .asked = size}};
        if (void* const p = obtain(size, alignment, until, r)) return p;
        if (r.thrown) std::rethrow_exception(r.thrown);
        throw memory_error(r.why, owner(), "allocate");
    }
    /// The same, null instead of an exception; `why`, unless it is null, gets the reason.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr) noexcept {
        upstream_refusal r{.why = {.code = errc::out_of_memory, .asked = size}};
        void* const p = obtain(size, alignment, until, r);
        if (p == nullptr && why != nullptr) *why = r.why;
        return p;
    }

    /// Frees a block that no work uses any more. The block is back in the upstream once it is
    /// scrubbed. Null is ignored. submission_failed if the stream takes no work: the block stays
    /// allocated, so that no tenant sees its contents, and the caller may free it again. If the
    /// scrubbing fails later, the block is lost. closed: nothing happened.
    errc deallocate(void* p, byte_count size, std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return free_after(nullptr, p, size, alignment, {});
    }
    /// The same for a block that work before `used` may still use.
    errc deallocate_after(const point& used, void* p, byte_count size,
                          std::size_t alignment = alignof(std::max_align_t)) noexcept {
        return free_after(&used, p, size, alignment, {});
    }
    /// As deallocate; `note` is called once the block is back in the upstream.
    errc deallocate_then(void* p, std::size_t size, std::size_t alignment, const when_back& note) noexcept {
        return free_after(nullptr, p, size, alignment, note);
    }

    /// Gives back the blocks that are scrubbed by now, and returns their number. Never blocks on
    /// the stream.
    std::size_t collect() noexcept { return frees_.collect(); }
    /// Waits until all freed blocks are scrubbed and back. False at the deadline, or if one
    /// couldn't be scrubbed.
    bool drain(instant deadline) { return frees_.drain(deadline); }
    /// How many blocks are back so far; see deferred_frees.
    [[nodiscard]] std::uint64_t returned() const noexcept { return frees_.returned(); }
    /// See deferring_upstream.
    bool settle(std::uint64_t& seen) noexcept { return frees_.settle(seen); }
    /// Waits until a pending block is scrubbed, or until `deadline`; immediately false if none is
    /// pending, or if the scrubbing of all of them has failed.
    bool wait_any(instant deadline) const { return frees_.wait_any(deadline); }

    /// From now on every call is refused with errc::closed. True once all freed blocks are scrubbed
    /// and back; false if a call or a fill is under way at the deadline: call it again. Called when
    /// the upstream closes. A call from one of the upstream's hooks doesn't wait for other calls.
    bool close(instant deadline) {
        const bool waits = !in_hook(std::this_thread::get_id());
        return gate_.shut(waits ? deadline : instant::min()) && drain(deadline);
    }

    /// The bytes that the upstream takes for such a request.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept {
        return upstream_.charged(size, alignment);
    }
    /// As the upstream's; see concepts.hpp.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        return upstream_.refuses(size, alignment);
    }
    /// As the upstream's.
    [[nodiscard]] bytes largest_free() const noexcept { return upstream_.largest_free(); }
    /// As the upstream's.
    [[nodiscard]] std::string_view owner() const noexcept { return upstream_.owner(); }
    /// As the upstream's.
    [[nodiscard]] close_token closing() const noexcept { return upstream_.closing(); }
    /// As the upstream's; see quota::in_hook.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept { return upstream_.in_hook(thread); }
    /// Bytes that were freed and aren't back in the upstream.
    [[nodiscard]] bytes pending() const noexcept { return frees_.pending(); }
    /// The resource below.
    [[nodiscard]] Upstream& upstream() const noexcept { return upstream_.resource(); }

private:
    void* obtain(std::size_t size, std::size_t alignment, upstream_refusal& r) noexcept {
        const detail::call_gate::pass in(gate_);
        if (!in) {
            r.why.code = errc::closed;
            return nullptr;
        }
        for (auto seen = frees_.returned();;) {
            void* const p = upstream_.ask(size, alignment, r);
            if (p != nullptr || r.final || !frees_.settle(seen)) return p;
        }
    }

    template <clock Clock>
    void* obtain(std::size_t size, std::size_t alignment, const patience<Clock>& until, upstream_refusal& r) noexcept {
        if (const failure never_fits = refuses(size, alignment); never_fits.code != errc::none) {
            r.why = never_fits;
            return nullptr;
        }
        for (;;) {
            void* const p = obtain(size, alignment, r);
            if (p != nullptr || r.final || r.why.code == errc::closed) return p;
            const auto now = until.time.now();
            if (until.stop.stop_requested() || now >= until.deadline) {
                r.thrown = nullptr;
                r.why.code = now >= until.deadline ? errc::deadline_exceeded : errc::stopped;
                return nullptr;
            }
            rest(std::min(until.deadline, saturating_add(now, detail::look_slice)), now);
        }
    }
    // Waits until a block is scrubbed, or until `by`.
    void rest(instant by, instant now) const noexcept {
        try {
            if (wait_any(by)) return;
        } catch (...) {  // the wait failed
        }
        std::this_thread::sleep_for(by - now);
    }

    errc free_after(const point* used, void* p, std::size_t size, std::size_t alignment,
                    const when_back& note) noexcept {
        if (p == nullptr) return errc::none;
        const detail::call_gate::pass in(gate_);
        if (!in) return errc::closed;
        try {
            if (policy_ == scrub_policy::off) {
                return accepted(frees_.add({.end = used != nullptr ? *used : point{}}, p, size, alignment, note));
            }
            if (used != nullptr) stream_->wait(*used);
            // another kernel's failure fails no fill
            const typename detail::own_work_of<Stream>::type mine(*stream_);
            if (size != 0) stream_->fill(p, std::byte{0}, size);
            return accepted(frees_.add({.end = stream_->record(), .scrubs = true, .scrubbing = mine.how_it_went()}, p,
                                       size, alignment, note));
        } catch (...) {
            return errc::submission_failed;
        }
    }

    static errc accepted(bool all) noexcept { return all ? errc::none : errc::submission_failed; }

    upstream_ref<Upstream> upstream_;
    Stream* stream_;
    scrub_policy policy_;
    deferred_frees<detail::scrubbed_point<point, typename detail::own_work_of<Stream>::outcome>, Upstream> frees_;
    detail::call_gate gate_;
    std::optional<close_callback> closes_;  // last: other members still exist while it is called
};

static_assert(deferring_upstream<scrubbing_resource<detail::plain_resource, host_scrubber<immediate_point>>>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
