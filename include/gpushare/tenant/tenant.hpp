// SPDX-License-Identifier: Apache-2.0
// A tenant: one handle over its memory, its device time and its usage on the devices that it was
// admitted to.
//
//   // see tenancy.hpp
//   auto chat = shared.admit({.name = "chat", .memory = 8_GiB, .compute = 60_pct});
//   void* weights = chat.memory().allocate(1_GiB);
//   auto step = chat.submit([&](auto& stream) { stream.launch(shape, kernel); });
//   step.wait();
//   chat.close();
//
// A submission takes options (submit_options; each may be left out) and a callback for its
// completion. A thread can wait for a ticket, and can cancel it while the submission waits. A
// ticket reports the exception that the callable or the work threw, and names the tenant:
//
//   auto page = chat.submit(work, {.key = 7, .width = gpushare::sm_width::of_sms(1, 2), .deadline = now + 80ms, .drop_if_late = true},
//                           [](const gpushare::completion& c) { if (c.status != gpushare::errc::none) ... });
//   // "tenant 'chat': ...: cannot open the page"
//   page.wait();    if (page.status() != gpushare::errc::none) page.rethrow();
//
// Submissions that belong together are a request. A coroutine waits without a thread:
//
//   auto answer = chat.request({.deadline = now + 50ms});    answer.submit(layer_1).wait();    answer.submit(layer_2).wait();
//   auto done = co_await chat.async_submit(work);
//
// A sleeping tenant runs nothing and gives its caches back. New submissions wait until it wakes, or
// are refused immediately:
//
//   chat.sleep(chat.now() + 1s, {}, gpushare::while_asleep::refuse);    chat.wake();
//
// Blocks of a tenant may leave the device. When the tenant lacks memory there, or a neighbour wants
// its burst back, the least recently used blocks are copied to the host. They come back when they
// are used. A tenancy's options say where they go: tenancy_options::spill and spill_to.
//
//   auto adapter = chat.allocate_spillable(512_MiB);
//   if (auto use = adapter.use()) chat.submit([&](auto& s) { s.launch(shape, reads{use.data()}); }).wait();
//
// A vendor's library, such as cuBLAS, allocates device memory for a tenant without the tenant's
// allocator. Once declared, such a workspace is charged to the tenant, and isn't set aside as
// overhead of the device. (The workspaces of collectives are something else.)
//
//   // after the library took it; charged as long as `blas` lives
//   auto blas = chat.declare_workspace(32_MiB);
//
// A tenant can also be used as a node, which has the tenant's devices and the tenant's memory on
// them. If an object takes a node and allocates there, such as a communicator with its workspaces,
// the memory is charged to the tenant and ends with the tenant:
//
//   gpushare::tenant_node mine{node, chat};
//   // its workspaces are in chat's memory
//   gpushare::device_communicator group{mine, visible, chat.spec().on};
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/tenant/detail/checked_specification.hpp>
#include <gpushare/tenant/detail/device_overhead.hpp>
#include <gpushare/tenant/detail/grant_followers.hpp>
#include <gpushare/tenant/detail/room_wait.hpp>
#include <gpushare/tenant/detail/spill_list.hpp>
#include <gpushare/tenant/detail/tenant_state.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Bytes of a device that a library allocated for a tenant without the tenant's allocator. Charged
/// as long as the object lives; movable.
class workspace {
public:
    workspace() noexcept = default;
    /// `charged` bytes that are already charged to `from`. Both arguments must outlive the
    /// workspace.
    workspace(quota& from, detail::device_overhead& on, bytes charged) noexcept
        : from_(&from), on_(&on), size_(charged) {
        on.declare(charged);
    }
    /// The same for memory that the device doesn't know of.
    workspace(quota& from, bytes charged) noexcept : from_(&from), size_(charged) {}
    /// Takes over the charge.
    workspace(workspace&& other) noexcept : from_(other.from_), on_(other.on_), size_(other.size_) { other.forget(); }
    /// Gives back its own charge, and takes over `other`'s.
    workspace& operator=(workspace&& other) noexcept {
        if (this == &other) return *this;
        give_back();
        from_ = other.from_;
        on_ = other.on_;
        size_ = other.size_;
        other.forget();
        return *this;
    }
    ~workspace() { give_back(); }

    /// Bytes that are charged.
    [[nodiscard]] bytes size() const noexcept { return size_; }

private:
    void forget() noexcept {
        from_ = nullptr;
        size_ = {};
    }
    void give_back() noexcept {
        if (from_ == nullptr) return;
        if (on_ != nullptr) on_->withdraw(size_);
        from_->release(size_);
    }

    quota* from_ = nullptr;
    detail::device_overhead* on_ = nullptr;
    bytes size_{};
};

/// The request that tenant::request returns. Neither copied nor moved; for one thread at a time.
/// Must end before its tenant.
template <class Limiter>
class [[nodiscard]] tenant_request {
public:
    using stream = typename Limiter::stream;  ///< The stream of its submissions.

    /// Called by the tenant that owns the streams and the name.
    tenant_request(Limiter& limiter, client_id client, std::span<stream> streams, std::string_view name,
                   const request_options& options)
        : request_(limiter, client, options), streams_(streams), name_(name) {}

    /// As tenant::submit. The remaining time is the request's. So is the deadline, unless the
    /// deadline of `o` is earlier.
    typename Limiter::ticket submit(submission_work<stream> work, const submit_options& o = {},
                                    submission_callback on_done = {}) {
        return try_submit(std::move(work), o, std::move(on_done)).value(name_, "submit");
    }
    /// As submit, with the reason instead of an exception.
    [[nodiscard]] result<typename Limiter::ticket> try_submit(submission_work<stream> work,
                                                              const submit_options& o = {},
                                                              submission_callback on_done = {}) {
        if (o.stream >= streams_.size())
            return failure{errc::invalid_specification, o.stream, 0, streams_.size(), reason::no_such_stream};
        return request_.submit(streams_[o.stream], std::move(work), o, std::move(on_done));
    }

private:
    gpushare::request<Limiter> request_;
    std::span<stream> streams_;
    std::string_view name_;
};

/// A block that may be on the host. Movable; one owner. The destructor frees the block, and must
/// run before the tenancy's destructor; the tenant may be closed by then. Safe from any thread,
/// except for moves.
template <class List>
class spillable {
    using entry = typename List::entry;

public:
    /// Keeps the block on its device, at one address. Movable; must not outlive the block.
    class lease {
    public:
        /// Takes over the other's lease.
        lease(lease&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), block_(other.block_), why_(other.why_) {}
        lease& operator=(lease&&) = delete;
        ~lease() {
            if (of_ != nullptr) of_->let_go(*block_);
        }

        /// Whether the block is on the device.
        [[nodiscard]] explicit operator bool() const noexcept { return of_ != nullptr; }
        /// Why the block isn't on the device: out_of_memory (the device has no room),
        /// deadline_exceeded, closed, or the error of the copy.
        [[nodiscard]] errc code() const noexcept { return why_; }
        /// The address, for work on any stream; null if the block isn't on the device. Nothing may
        /// use it after the lease.
        [[nodiscard]] void* data() const noexcept { return of_ != nullptr ? block_->block.data() : nullptr; }

    private:
        friend spillable;
        lease(List& of, entry& block, errc why) noexcept
            : of_(why == errc::none ? &of : nullptr), block_(&block), why_(why) {}

        List* of_;
        entry* block_;
        errc why_;
    };

    /// Called by the tenant that owns the memory `of`.
    spillable(std::shared_ptr<List> of, entry& block) noexcept : of_(std::move(of)), block_(&block) {}
    /// Takes over `other`'s block.
    spillable(spillable&& other) noexcept : of_(std::move(other.of_)), block_(std::exchange(other.block_, nullptr)) {}
    /// Frees its own block, and takes over `other`'s.
    spillable& operator=(spillable&& other) noexcept {
        spillable mine(std::move(other));
        std::swap(of_, mine.of_);
        std::swap(block_, mine.block_);
        return *this;
    }
    ~spillable() {
        if (block_ != nullptr) of_->remove(*block_);
    }

    /// Brings the block back if it is on the host, and waits until it is there. Other blocks of the
    /// tenant may have to leave for it.
    [[nodiscard]] lease use(instant deadline = never) { return {*of_, *block_, of_->hold(*block_, deadline)}; }
    /// Moves the block to the host now, before a request lacks its bytes. in_flight: a lease holds
    /// the block. deadline_exceeded: the block is still on its way, and stays on the device if
    /// use() comes first. out_of_memory: the host has no room. closed; otherwise the copy's error.
    [[nodiscard]] errc leave(instant deadline = never) { return of_->send(*block_, deadline); }
    /// Whether the block is on the device now, used or not. False while it is on its way.
    [[nodiscard]] bool resident() const noexcept { return of_->resident(*block_); }
    /// The size of the block.
    [[nodiscard]] bytes size() const noexcept { return block_->block.size(); }

private:
    std::shared_ptr<List> of_;
    entry* block_;
};

template <node Node, compute_policy Policy>
class tenancy;
namespace detail {
template <node Node, compute_policy Policy>
class succession;
}  // namespace detail

/// As long as a grant_watch lives, its function gets the tenant's grant; see tenant::watch_grant.
/// Movable; may outlive the tenant. Its destructor waits for a call that is under way.
class grant_watch {
public:
    /// Called by the tenant.
    grant_watch(std::shared_ptr<detail::grant_followers> of, std::uint64_t number) noexcept
        : of_(std::move(of)), number_(number) {}
    /// Takes over the watch of `other`.
    grant_watch(grant_watch&& other) noexcept : of_(std::move(other.of_)), number_(other.number_) {}
    grant_watch& operator=(grant_watch&&) = delete;
    ~grant_watch() {
        if (of_ != nullptr) of_->remove(number_);
    }

private:
    std::shared_ptr<detail::grant_followers> of_;
    std::uint64_t number_;
};

/// The handle of a tenant. Movable; one owner. Safe from any thread, except the destructor and
/// assignment. Calls that overlap a close, or come after it, are refused (errc::closed). `part`
/// counts the tenant's devices from 0. The destructor closes the tenant; memory that could not be
/// given back in time stays charged and is reported.
template <node Node, compute_policy Policy = weighted_fair>
class tenant {
    using state = detail::tenant_state<Node, Policy>;

public:
    /// The node's stream type.
    using stream = typename Node::stream;
    /// The limiter of a device, or of a slice of one.
    using limiter = typename detail::shared_node<Node, Policy>::limiter;
    /// The handle of a queued submission.
    using ticket = typename limiter::ticket;
    /// The right to enqueue one submission.
    using permit = typename limiter::permit;
    /// The type of memory(): a tenant_memory.
    using memory_type = typename state::part::memory_type;

    /// Called by the tenancy.
    explicit tenant(std::unique_ptr<state> all) noexcept : state_(std::move(all)) {}
    // Not defaulted: g++ emits a defaulted function in each file, in spite of `extern template`.
    /// Takes over `other`, which may only be destroyed or assigned to from then on.
    tenant(tenant&& other) noexcept : state_(std::move(other.state_)) {}
    /// Closes this tenant, as the destructor does, and takes over `other`.
    tenant& operator=(tenant&& other) noexcept {
        tenant(std::move(other)).state_.swap(state_);
        return *this;
    }
    ~tenant();

    /// The name with which the tenant was admitted.
    [[nodiscard]] const std::string& name() const noexcept { return state_->name(); }
    /// The current grant, resizes included, with the devices that were chosen.
    [[nodiscard]] tenant_spec spec() const;

    /// Calls `told` with the current grant: immediately, and after each change of the grant as long
    /// as the result lives. A call after a change runs in the thread of the change, before the
    /// change returns. Calls come one at a time, under no lock of the tenancy's, and the last call
    /// has the current grant. `told` must not change a tenant, or make or end a watch or a gate's
    /// client of this tenant. Later exceptions of `told` are ignored. The tenant that move_tenant
    /// makes of this one is another tenant. Throws std::bad_alloc, and the exceptions of the first
    /// call.
    [[nodiscard]] grant_watch watch_grant(std::function<void(const tenant_spec&)> told) {
        auto all = state_->followers();
        const auto number = all->add(std::move(told), [this](tenant_spec& into) { state_->copy_grant(into); });
        return grant_watch(std::move(all), number);
    }

    /// The number of the tenant's streams in the node's ledgers and traces. Never used twice.
    [[nodiscard]] std::uint32_t tag() const noexcept { return state_->tag(); }

    /// The time of its node, for deadlines.
    [[nodiscard]] instant now() const noexcept { return state_->now(); }

    /// The tenant's memory on one of its devices. Throws operation_error: closed, or no_device if
    /// the tenant has fewer devices.
    [[nodiscard]] memory_type& memory(std::size_t part = 0) { return at(part).memory; }
    /// The stream of the tenant's submissions with this number (see tenant_spec::streams). Work
    /// enqueued directly on the stream bypasses the limiter, and is charged to no tenant. Throws as
    /// memory(), and invalid_specification if there are fewer streams.
    [[nodiscard]] stream& work_stream(std::size_t part = 0, std::size_t number = 0);

    /// The slice of the device's SMs that the tenant is in; 0 on a whole device. Its limiter is
    /// tenancy::limiter_of(device, slice).
    [[nodiscard]] std::uint32_t slice(std::size_t part = 0) { return at(part).slice.index; }

    /// Charges bytes of the device that a vendor's library took for this tenant, past its memory().
    /// Measurements of the device then don't set these bytes aside as overhead. Throws memory_error
    /// as an allocation would. Destroy the result before the tenant.
    [[nodiscard]] workspace declare_workspace(bytes size, std::size_t part = 0) {
        return try_declare_workspace(size, part).value(name(), "declare a workspace");
    }
    /// The same, with the reason instead of an exception.
    [[nodiscard]] result<workspace> try_declare_workspace(bytes size, std::size_t part = 0);
    /// As declare_workspace, but waits for bytes as tenant_memory::allocate with a patience.
    template <clock Clock>
    [[nodiscard]] workspace declare_workspace(bytes size, const patience<Clock>& until, std::size_t part = 0) {
        return try_declare_workspace(size, until, part).value(name(), "declare a workspace");
    }
    /// The same, with the reason instead of an exception.
    template <clock Clock>
    [[nodiscard]] result<workspace> try_declare_workspace(bytes size, const patience<Clock>& until,
                                                          std::size_t part = 0) {
        return declare<true>(size, part, [&](quota& from) { return gpushare::try_charge(from, size, until); });
    }
    /// The old name of declare_workspace() with a patience. 0.3 removes it.
    template <class... Args>
    requires(detail::is_patience<Args> || ...)
        [[deprecated("use declare_workspace with a patience")]] [[nodiscard]] workspace
        declare_workspace_until(const Args&... args) {
        return declare_workspace(args...);
    }
    /// The same as declare_workspace, for memory that the device doesn't account for, such as the
    /// host memory of an engine on the CPU. See foreign_memory.hpp.
    [[nodiscard]] workspace declare_foreign(bytes size, std::size_t part = 0) {
        return try_declare_foreign(size, part).value(name(), "declare a workspace");
    }
    /// The same, with the reason instead of an exception.
    [[nodiscard]] result<workspace> try_declare_foreign(bytes size, std::size_t part = 0);

    /// A block that is on the device while in use, and may otherwise be on the host; see spillable.
    /// Throws the errors of memory() and of an allocation, and not_supported if the tenant has no
    /// tenant_spec::spill.
    [[nodiscard]] auto allocate_spillable(bytes size, std::size_t part = 0) requires copier<stream> {
        return make_spillable(
            part, [&](auto& spills) -> auto& { return spills.add(size); });
    }
    /// The same, with the reason instead of an exception.
    [[nodiscard]] auto try_allocate_spillable(bytes size, std::size_t part = 0) requires copier<stream> {
        return detail::or_why([&] { return allocate_spillable(size, part); });
    }
    /// As allocate_spillable, but waits for bytes as tenant_memory::allocate with a patience.
    template <clock Clock>
    [[nodiscard]] auto allocate_spillable(bytes size, const patience<Clock>& until,
                                          std::size_t part = 0) requires copier<stream> {
        return make_spillable(
            part, [&](auto& spills) -> auto& { return spills.add(size, until); });
    }
    /// The same, with the reason instead of an exception.
    template <clock Clock>
    [[nodiscard]] auto try_allocate_spillable(bytes size, const patience<Clock>& until,
                                              std::size_t part = 0) requires copier<stream> {
        return detail::or_why([&] { return allocate_spillable(size, until, part); });
    }

    /// Queues work; see compute_limiter::submit. `o` may name one of the tenant's streams. Throws
    /// operation_error: closed, queue_full, quarantined, device_lost, no_device,
    /// invalid_specification (no such stream, no callable).
    ticket submit(submission_work<stream> work, const submit_options& o = no_options, submission_callback on_done = {},
                  std::size_t part = 0, const std::stop_token& stop = {});
    /// The same on another of the tenant's devices.
    ticket submit(submission_work<stream> work, std::size_t part) {
        return submit(std::move(work), no_options, {}, part);
    }
    /// As submit, with the reason instead of an exception.
    [[nodiscard]] result<ticket> try_submit(submission_work<stream> work, const submit_options& o = no_options,
                                            submission_callback on_done = {}, std::size_t part = 0,
                                            const std::stop_token& stop = {});
    /// The same on another of the tenant's devices.
    [[nodiscard]] result<ticket> try_submit(submission_work<stream> work, std::size_t part) {
        return try_submit(std::move(work), no_options, {}, part);
    }
    /// As submit, for a coroutine: `co_await` gives the completion; see handles.hpp. Throws as
    /// work_stream.
    [[nodiscard]] async_submission<limiter> async_submit(submission_work<stream> work,
                                                         const submit_options& o = no_options, std::size_t part = 0) {
        auto& p = at(part);
        return {p.slice.compute, p.client, work_stream(part, o.stream), std::move(work), o};
    }
    /// Begins a request on one of the tenant's devices; see tenant_request. Throws as memory(), and
    /// share_exceeded if the policy refuses the level.
    [[nodiscard]] tenant_request<limiter> request(const request_options& o = {}, std::size_t part = 0);
    /// Waits at the gate; see compute_limiter::acquire.
    [[nodiscard]] result<permit> acquire(std::size_t part = 0, instant deadline = never,
                                         const std::stop_token& stop = {}, const submit_options& o = no_options);
    /// The same, with the options first, as in submit.
    [[nodiscard]] result<permit> acquire(const submit_options& o, instant deadline = never,
                                         const std::stop_token& stop = {}, std::size_t part = 0) {
        return acquire(part, deadline, stop, o);
    }

    /// The tenant's place in gangs: a member for each of its devices, for work whose ranks wait for
    /// each other, such as collectives; see handles.hpp. Valid until the tenant is closed. Throws
    /// operation_error (closed).
    [[nodiscard]] std::vector<typename gang_permit<limiter>::member> gang();

    /// When one more submission of this kind would begin and end; see compute_limiter::estimate.
    /// Throws as memory().
    [[nodiscard]] submission_estimate estimate(std::uint64_t key = 0, std::size_t part = 0);
    /// Ends a quarantine on all of the tenant's devices; see limiter_options::quarantine_after.
    void pardon();

    /// Admits no new work, waits until work in flight has ended, and gives back the memory that the
    /// tenant's pools, caches and spillable blocks keep (it calls all hooks of the tenant's quota).
    /// Waiting submissions stay queued, and new ones wait behind them until wake(). With
    /// while_asleep::refuse, both are refused with errc::asleep. Quota and share remain promised.
    /// With tenant_spec::lends_asleep, the bytes that the quota leaves free are lent to others
    /// until the tenant wakes. Returns false at the deadline, for a stop request, or after close():
    /// then the tenant isn't asleep on any device, and refused submissions stay refused. Don't call
    /// it from one of the tenant's own callbacks.
    bool sleep(instant deadline = never, const std::stop_token& stop = {},
               while_asleep what_waits = while_asleep::keep);
    /// Ends sleep(). Does nothing if the tenant isn't asleep. A tenant that lends its guarantee in
    /// its sleep (tenant_spec::lends_asleep) asks the borrowers for it by the hooks of their
    /// quotas, and waits until `deadline`; by default it doesn't wait. Then it throws
    /// operation_error (deadline_exceeded, stopped), which names the largest borrower: the tenant
    /// sleeps on, and can be woken again. For other tenants wake() doesn't throw.
    void wake(instant deadline = instant::min(), const std::stop_token& stop = {});
    /// The same, with the reason instead of an exception.
    failure try_wake(instant deadline = instant::min(), const std::stop_token& stop = {}) try {
        wake(deadline, stop);
        return {};
    } catch (const operation_error& e) {
        return e.figures();
    }
    /// If the tenant sleeps and lends its guarantee, also lends the memory that was freed since.
    /// Otherwise does nothing.
    void lend_more();
    /// How long a wake would have to wait now: how many bytes of the guarantee others use, and how
    /// long recalls take.
    [[nodiscard]] recall_forecast recall() const;

    /// The tenant's usage, now and so far; final after close().
    [[nodiscard]] tenant_usage usage();

    /// Changes the tenant's grant, while work is in flight, all or nothing. Throws operation_error:
    /// no_room (its figures are bytes on one device), share_exceeded (permille), slo_unreachable
    /// (ns), not_whole and invalid_specification (with the field and its value), closed; and
    /// std::bad_alloc.
    void resize(const tenant_change& change);

    /// The same, with the reason instead of an exception.
    [[nodiscard]] failure try_resize(const tenant_change& change) try {
        resize(change);
        return {};
    } catch (const operation_error& e) {
        return e.figures();
    }

    /// As resize, but if lent burst is in the way (no_room), asks the borrowers to give it back,
    /// and waits, as tenancy::admit with a patience does. A request that doesn't fit alongside
    /// others' guarantees is refused immediately.
    template <clock Clock>
    void resize(const tenant_change& change, const patience<Clock>& until) {
        detail::room_wait wait{roots(), until};
        for (;;) try {
                return resize(change);
            } catch (const operation_error& e) {
                const bytes more = growth(e.figures());
                if (e.code() != errc::no_room || !could_grow(more)) throw;
                if (const errc why = wait.again(more); why != errc::none) wait.refuse(why, e.figures(), name(), more);
            }
    }
    /// The same, with the reason instead of an exception.
    template <clock Clock>
    [[nodiscard]] failure try_resize(const tenant_change& change, const patience<Clock>& until) try {
        resize(change, until);
        return {};
    } catch (const operation_error& e) {
        return e.figures();
    }
    /// The old name of resize() with a patience. 0.3 removes it.
    [[deprecated("use resize with a patience")]] void resize_until(const tenant_change& change, const auto& until) {
        resize(change, until);
    }

    /// Whether close() has reached the point from which all calls are refused.
    [[nodiscard]] bool closed() const noexcept { return state_->closed(); }

    /// Ends the tenant: cancels waiting submissions, waits for those in flight, takes back leaked
    /// blocks, and returns quota, share and name. If the report is incomplete at the deadline,
    /// nothing was taken from running work; call again.
    close_report close(instant deadline = never, const std::stop_token& stop = {});

private:
    template <node, compute_policy>
    friend class tenancy;
    template <node, compute_policy>
    friend class detail::succession;

    // The root quotas of the tenant's devices.
    [[nodiscard]] detail::plain_list<quota*> roots();
    // The bytes that a refused resize lacks on one device.
    [[nodiscard]] bytes growth(const failure& refused) const {
        return bytes{refused.asked} - (spec().memory / spec().devices);
    }
    // Whether the devices could promise the tenant `more` bytes if all lent memory came back.
    [[nodiscard]] bool could_grow(bytes more) const;
    // The same for a recall.
    [[nodiscard]] static bytes lack(const failure& refused) noexcept {
        return bytes{refused.asked} - bytes{refused.left};
    }
    // A workspace charged by `charge`, which returns the reason if it fails.
    template <bool OfDevice, class Charge>
    [[nodiscard]] result<workspace> declare(bytes size, std::size_t part, Charge charge) {
        auto* const p = state_->find(part);
        if (p == nullptr || state_->closed()) return missing(part);
        if (const failure why = charge(p->memory.limit()); why.code != errc::none) return why;
        if constexpr (!OfDevice) return result<workspace>(workspace(p->memory.limit(), size));
        return result<workspace>(workspace(p->memory.limit(), p->on.overhead, size));
    }
    // Wraps the block that `add` makes in the list of spillable blocks.
    template <class Add>
    [[nodiscard]] auto make_spillable(std::size_t part, Add add) {
        auto& store = at(part).store;
        if (!store->spills)
            raise({.code = errc::not_supported, .because = reason::no_spill}, name(), "allocate a spillable block");
        using list = typename decltype(store->spills)::value_type;
        return spillable<list>(std::shared_ptr<list>(store, &*store->spills), add(*store->spills));
    }
    typename state::part& at(std::size_t part) {
        auto* const found = state_->find(part);
        if (found == nullptr || state_->closed()) [[unlikely]]
            raise(missing(part), name());
        return *found;
    }

    static failure charge(quota& from, bytes size) noexcept;

    [[nodiscard]] static failure no_stream(std::size_t number, std::size_t there) noexcept {
        return {errc::invalid_specification, number, 0, there, reason::no_such_stream};
    }
    [[nodiscard]] failure missing(std::size_t part) const noexcept;

    void abandon() noexcept;

    std::unique_ptr<state> state_;
};

// Out of the class, and so without `inline`: an `extern template` then stops compilers from
// instantiating the members.

template <node Node, compute_policy Policy>
tenant<Node, Policy>::~tenant() {
    if (state_ != nullptr) abandon();
}

template <node Node, compute_policy Policy>
tenant_spec tenant<Node, Policy>::spec() const {
    return state_->spec();
}

template <node Node, compute_policy Policy>
auto tenant<Node, Policy>::work_stream(std::size_t part, std::size_t number) -> stream& {
    auto& all = at(part).streams;
    if (number >= all.size()) raise(no_stream(number, all.size()), name(), "choose a stream");
    return all[number];
}

template <node Node, compute_policy Policy>
result<workspace> tenant<Node, Policy>::try_declare_workspace(bytes size, std::size_t part) {
    return declare<true>(size, part, [&](quota& from) { return charge(from, size); });
}

template <node Node, compute_policy Policy>
result<workspace> tenant<Node, Policy>::try_declare_foreign(bytes size, std::size_t part) {
    return declare<false>(size, part, [&](quota& from) { return charge(from, size); });
}

template <node Node, compute_policy Policy>
auto tenant<Node, Policy>::submit(submission_work<stream> work, const submit_options& o, submission_callback on_done,
                                  std::size_t part, const std::stop_token& stop) -> ticket {
    return try_submit(std::move(work), o, std::move(on_done), part, stop).value(name(), "submit");
}

template <node Node, compute_policy Policy>
auto tenant<Node, Policy>::try_submit(submission_work<stream> work, const submit_options& o,
                                      submission_callback on_done, std::size_t part, const std::stop_token& stop)
    -> result<ticket> {
    if (part >= state_->parts().size()) return missing(part);
    auto& p = state_->parts()[part];
    if (o.stream >= p.streams.size()) return no_stream(o.stream, p.streams.size());
    return p.slice.compute.submit(p.client, p.streams[o.stream], std::move(work), o, std::move(on_done), stop);
}

template <node Node, compute_policy Policy>
auto tenant<Node, Policy>::request(const request_options& o, std::size_t part) -> tenant_request<limiter> {
    auto& p = at(part);
    return {p.slice.compute, p.client, p.streams, name(), o};
}

template <node Node, compute_policy Policy>
auto tenant<Node, Policy>::acquire(std::size_t part, instant deadline, const std::stop_token& stop,
                                   const submit_options& o) -> result<permit> {
    if (part >= state_->parts().size()) return missing(part);
    auto& p = state_->parts()[part];
    return p.slice.compute.acquire(p.client, deadline, stop, o);
}

template <node Node, compute_policy Policy>
auto tenant<Node, Policy>::gang() -> std::vector<typename gang_permit<limiter>::member> {
    std::vector<typename gang_permit<limiter>::member> all;
    for (std::size_t part = 0; part < state_->parts().size(); ++part) {
        auto& p = at(part);
        all.push_back({&p.slice.compute, p.client, p.device});
    }
    return all;
}

template <node Node, compute_policy Policy>
submission_estimate tenant<Node, Policy>::estimate(std::uint64_t key, std::size_t part) {
    auto& p = at(part);
    return p.slice.compute.estimate(p.client, key);
}

template <node Node, compute_policy Policy>
void tenant<Node, Policy>::pardon() {
    for (auto& p : state_->parts()) (void)p.slice.compute.pardon(p.client);
}

template <node Node, compute_policy Policy>
bool tenant<Node, Policy>::sleep(instant deadline, const std::stop_token& stop, while_asleep what_waits) {
    return state_->sleep(deadline, stop, what_waits);
}

template <node Node, compute_policy Policy>
void tenant<Node, Policy>::wake(instant deadline, const std::stop_token& stop) {
    const patience until{detail::clock_of(*state_), deadline, stop};
    const auto why = state_->wake([&](failure last, auto again) {
        detail::idle_room idle{roots()};
        while (last.code == errc::no_room && idle.gather(lack(last))) last = again();
        detail::room_wait wait{roots(), until};
        while (last.code == errc::no_room) {
            const bytes more = lack(last);
            if (const errc over = wait.again(more); over != errc::none) wait.refuse(over, last, name(), more);
            last = again();
        }
        return last;
    });
    if (why.code != errc::none) raise(why, name(), "wake");
}

template <node Node, compute_policy Policy>
void tenant<Node, Policy>::lend_more() {
    state_->lend_more();
}

template <node Node, compute_policy Policy>
recall_forecast tenant<Node, Policy>::recall() const {
    return state_->recall();
}

template <node Node, compute_policy Policy>
tenant_usage tenant<Node, Policy>::usage() {
    return state_->usage();
}

template <node Node, compute_policy Policy>
void tenant<Node, Policy>::resize(const tenant_change& change) {
    detail::check_change(spec(), change);
    detail::idle_room idle{roots()};
    auto why = state_->change(change);
    while (why.code == errc::no_room && idle.gather(growth(why))) why = state_->change(change);
    if (why.code == errc::none) return;
    raise(why, name(), why.code == errc::no_room ? "resize, on one device" : "resize");
}

template <node Node, compute_policy Policy>
close_report tenant<Node, Policy>::close(instant deadline, const std::stop_token& stop) {
    return state_->finish(deadline, stop);
}

template <node Node, compute_policy Policy>
detail::plain_list<quota*> tenant<Node, Policy>::roots() {
    detail::plain_list<quota*> all;
    for (auto& p : state_->parts()) all.push_back(&p.on.memory);
    return all;
}

template <node Node, compute_policy Policy>
bool tenant<Node, Policy>::could_grow(bytes more) const {
    return std::ranges::all_of(state_->parts(),
                               [&](auto& p) { return p.on.memory.promisable() - p.on.asleep() >= more; });
}

template <node Node, compute_policy Policy>
failure tenant<Node, Policy>::charge(quota& from, bytes size) noexcept {
    errc why = from.try_charge(size);
    for (detail::hook_cursor asked; why != errc::none && from.ask_next(asked, size);) why = from.try_charge(size);
    return why == errc::none ? failure{} : from.explain(why, size);
}

template <node Node, compute_policy Policy>
failure tenant<Node, Policy>::missing(std::size_t part) const noexcept {
    if (state_->closed()) return {.code = errc::closed};
    return {errc::no_device, part, 0, state_->parts().size(), reason::no_such_part};
}

template <node Node, compute_policy Policy>
void tenant<Node, Policy>::abandon() noexcept {
    auto& all = state_->all();
    const tenant_name whose{name()};
    tenant_event left{tenant_event::kind::stuck, whose.view(), {}, errc::deadline_exceeded};
    try {
        const auto report = state_->finish(saturating_add(state_->now(), all.options.close_timeout));
        if (report.complete) return;
        if (report.waits_for == close_wait::memory && report.still_charged != bytes{})
            left.what = tenant_event::kind::charged;
    } catch (...) {
        left.code = errc::out_of_memory;  // of the host's
    }
    for (auto& p : state_->parts()) {
        left.device = p.device;
        if (left.what == tenant_event::kind::charged)
            left.size = p.has_memory ? p.memory.limit().usage().current : bytes{};
        detail::tell(all.options.events, left);
    }
    state::leave(std::move(state_));
}

/// Splits long work of a tenant into pieces, so that tenants of a higher level get in between them:
/// calls `enqueue(stream, i)` for i from 0 in order, each as a submission of its own. The ticket is
/// for all pieces, and has the status of the first one that failed; no piece is enqueued behind a
/// failure. Later submissions of the tenant on the same stream wait behind all pieces. Fails with
/// the codes of tenant::try_submit or std::bad_alloc, and then no further piece is enqueued.
/// Thread-safe.
template <node Node, compute_policy Policy, std::invocable<typename Node::stream&, std::size_t> F>
[[nodiscard]] auto submit_chunked(tenant<Node, Policy>& who, std::size_t pieces, F enqueue,
                                  const submit_options& o = no_options, std::size_t part = 0) {
    using limiter = typename tenant<Node, Policy>::limiter;
    return detail::submit_pieces<limiter>(pieces, std::move(enqueue), [&](auto work, auto on_done) {
        return who.try_submit(std::move(work), o, std::move(on_done), part);
    });
}

/// A tenant as a node. Models `node`. Refers to the node and to the tenant's memory, so the
/// tenant's handle must outlive it. Objects that are made on it must be gone before the tenant
/// closes, because a close takes their memory back like any other. The streams are the node's,
/// outside any slice. Thread-safe.
template <node Node, compute_policy Policy = weighted_fair>
class tenant_node {
public:
    using stream = typename Node::stream;                            ///< the node's
    using memory_type = typename tenant<Node, Policy>::memory_type;  ///< a tenant_memory

    /// On the devices where `who` is now. Throws operation_error (closed); std::bad_alloc.
    tenant_node(Node& whole, tenant<Node, Policy>& who)
        : whole_(&whole), tag_(who.tag()), memory_(whole.num_devices()) {
        const auto on = who.spec().on;
        for (std::size_t part = 0; part < on.size(); ++part) memory_[on[part].index] = &who.memory(part);
    }

    /// The node's number of devices.
    [[nodiscard]] std::uint32_t num_devices() const noexcept { return whole_->num_devices(); }
    /// The tenant's memory. Throws operation_error (no_device) for a device that the tenant isn't
    /// on.
    [[nodiscard]] memory_type& memory(device_id d) const {
        if (d.index >= memory_.size() || memory_[d.index] == nullptr)
            raise({errc::no_device, d.index, 0, memory_.size()}, {}, "memory of a tenant's node");
        return *memory_[d.index];
    }
    /// A new stream of the node's, whose work is the tenant's in ledgers.
    [[nodiscard]] stream make_stream(device_id d, priority level = {}, std::uint32_t /*tag*/ = 0) const {
        return whole_->make_stream(d, level, tag_);
    }
    /// The node's.
    [[nodiscard]] auto get_clock() const { return whole_->get_clock(); }
    /// The node's.
    [[nodiscard]] decltype(auto) gangs() const { return whole_->gangs(); }

private:
    Node* whole_;
    std::uint32_t tag_;
    std::vector<memory_type*> memory_;  // of each device; null where the tenant isn't
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
