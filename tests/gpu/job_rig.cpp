// SPDX-License-Identifier: Apache-2.0
#include "gpu/job_rig.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/collective/tuning.hpp>

#include "standins/ptx/runtime.hpp"

namespace jobs {

const standin::options roomy{.devices = 4, .memory = gs::bytes{12ULL << 30}};

namespace {

const bool started = (standin::reset(roomy), true);

std::uint64_t below(std::mt19937_64& any, std::uint64_t n) { return any() % n; }

template <class T>
T number(std::mt19937_64& any, bool exact) {
    if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(static_cast<std::int64_t>(any()) >> (sizeof(T) == 8 ? 8 : 0));  // averages must fit
    } else if (exact) {
        return static_cast<T>(static_cast<float>(below(any, 9)) - 4);
    } else {
        constexpr std::array<float, 4> special{0.0F, -0.0F, 1e-40F, 448.0F};
        if (below(any, 32) == 0) return static_cast<T>(special[below(any, special.size())]);
        return static_cast<T>((static_cast<float>(below(any, 20'001)) - 10'000) / 997);
    }
}
template <class T>
void fill(std::byte* arena, part p, std::mt19937_64& any, bool exact) {
    T* const x = array<T>(arena, p);
    for (std::size_t i = 0; i < region / sizeof(T); ++i) x[i] = number<T>(any, exact);
}

template <class Kind>
void fill_arena(std::byte* arena, std::mt19937_64& any) {
    using T = typename Kind::in_type;
    fill<T>(arena, in, any, Kind::exact);
    fill<T>(arena, refill, any, Kind::exact);
    if constexpr (Kind::exact)
        fill<gs::bfloat16>(arena, residual, any, true);
    else
        fill<float>(arena, residual, any, false);
}

/// Blocks that have a scale each differ much from their neighbours, and what lies behind the last
/// number differs more: whoever reads a number too many finds another scale.
template <class Kind>
void make_uneven(const job& j, std::byte* arena) {
    using T = typename Kind::in_type;
    for (const part p : {in, refill}) {
        T* const x = array<T>(arena, p, j.in_shift);
        for (std::size_t i = 0; i < region / sizeof(T) - j.in_shift; ++i) {
            const float by = i / Kind::block % 2 == 0 ? 1.0F : 0x1p20F;
            x[i] = static_cast<T>(i < j.count ? by * static_cast<float>(x[i]) : 0x1p60F);
        }
    }
}

bool has_no_count(const job& j) {
    bool yes = false;
    with_kind(j.which,
              [&](auto k) { yes = std::is_same_v<decltype(decltype(k)::body(j, 0, nullptr)), detail::barrier_body>; });
    return yes;
}

std::byte* aligned_begin(std::vector<std::byte>& room, std::size_t size) {
    room.resize(size + 256);
    void* at = room.data();
    std::size_t space = room.size();
    return static_cast<std::byte*>(std::align(256, size, at, space));
}

/// Threads that stay from job to job.
struct host_side {
    gs::host::node apart{{.devices = most_ranks, .memory = gs::bytes{1 << 20}, .sms = 2}};
    gs::host::node together{{.devices = 1, .memory = gs::bytes{1 << 20}, .sms = 2 * most_ranks}};
};

}  // namespace

bool in_order_of_threads(const job& j) {
    bool yes = false;
    with_kind(j.which, [&](auto k) { yes = std::is_same_v<decltype(k), fused<float, layered, false, true>>; });
    return yes;
}

bool is_by_rows(const job& j) {
    bool yes = false;
    with_kind(j.which, [&](auto k) { yes = decltype(k)::by_rows; });
    return yes;
}

void bring_infinities(const job& j, std::span<std::byte> arenas) {
    with_kind(j.which, [&](auto k) {
        using T = typename decltype(k)::in_type;
        T* const brought = array<T>(arenas.data(), in, j.in_shift);
        constexpr bool has_infinity = !std::is_integral_v<T> && !std::is_same_v<T, gs::fp8_e4m3>;
        if constexpr (std::is_same_v<decltype(k), fused<gs::bfloat16, normed, false, false>> ||
                      std::is_same_v<decltype(k), fused<gs::bfloat16, grouped, false, false>>)
            brought[0] = static_cast<T>(INFINITY);
        else if constexpr (has_infinity && !decltype(k)::by_rows)
            for (std::size_t i = 0; i < j.count; i += 3) brought[i] = static_cast<T>(INFINITY);
    });
}

job random_job(std::mt19937_64& any) { return random_job(any, static_cast<std::uint32_t>(below(any, kinds))); }

job random_job(std::mt19937_64& any, std::uint32_t which) {
    job j{.which = which, .ranks = static_cast<std::uint32_t>(2 + below(any, below(any, 4) == 0 ? 7 : 2))};
    j.in_shift = static_cast<std::uint32_t>(below(any, 2) == 0 ? 0 : below(any, 17));
    j.out_shift = static_cast<std::uint32_t>(below(any, 2) == 0 ? 0 : below(any, 17));
    j.blocks = static_cast<std::uint32_t>(1 + below(any, 2));
    constexpr std::array<std::uint32_t, 8> sizes{1, 2, 31, 32, 33, 64, 77, 96};
    j.threads = sizes[below(any, sizes.size())];
    j.rounds = static_cast<std::uint32_t>(1 + below(any, 3));
    j.root = static_cast<std::uint32_t>(below(any, j.ranks));
    j.how = static_cast<gs::algorithm>(below(any, 3));
    j.pinned = below(any, 4) == 0;
    if (below(any, 4) == 0) j.first_epoch = ~std::uint32_t{0} - static_cast<std::uint32_t>(below(any, 3));
    for (step& s : j.steps)
        s = {static_cast<std::uint32_t>(below(any, kinds_of_steps)), static_cast<float>(1 + below(any, 7)) / 4};
    with_kind(which, [&](auto k) {
        using kind = decltype(k);
        const std::size_t room = region / sizeof(typename kind::in_type) - 16;
        if constexpr (kind::by_rows) {
            j.width = 1 + below(any, below(any, 2) == 0 ? 40 : 300);
            if (kind::in_pairs) j.width += j.width % 2;
            const std::size_t most = std::min(region / 4 - 16, room) / j.width;  // results and residuals may be floats
            j.count = j.width * (1 + below(any, std::min<std::size_t>(most, 9)));
        } else {
            const std::size_t most = kind::wide ? room / j.ranks - (kind::unequal ? 1 : 0) : room;
            j.count = 1 + below(any, std::min<std::size_t>(most, below(any, 4) == 0 ? 2000 : 200));
        }
    });
    if (in_order_of_threads(j)) j.threads = 1;
    return j;
}

job random_medley(std::mt19937_64& any) {
    const bool together = below(any, 2) == 0;
    job j = random_job(any, together ? with_bfloats_together[below(any, with_bfloats_together.size())]
                                     : with_floats_apart[below(any, with_floats_apart.size())]);
    j.medley = true;
    j.rounds = static_cast<std::uint32_t>(2 + below(any, 7));
    j.width = 1 + below(any, 40);  // what all of them have room for
    j.count = j.width * (1 + below(any, 4));
    j.pinned = false;  // which not all of them can
    return j;
}

std::string to_string(const job& j) {
    std::string text = (j.medley ? "medley from kind " : "kind ") + std::to_string(j.which) + ", ranks " +
                       std::to_string(j.ranks) + ", count " + std::to_string(j.count) + ", width " +
                       std::to_string(j.width) + ", root " + std::to_string(j.root) + ", shifts " +
                       std::to_string(j.in_shift) + " " + std::to_string(j.out_shift) + ", blocks " +
                       std::to_string(j.blocks) + ", threads " + std::to_string(j.threads) + ", rounds " +
                       std::to_string(j.rounds) + ", algorithm " + std::string(gs::to_string(j.how)) +
                       (j.pinned ? ", pinned" : "") + ", first epoch " + std::to_string(j.first_epoch) + ", steps";
    for (const step& s : j.steps) text += " " + std::to_string(s.what) + ":" + std::to_string(s.factor);
    return text;
}

std::size_t elements(const job& j) {
    std::size_t of_rank = 0;
    for (std::uint32_t round = 0; round < j.rounds; ++round)
        with_kind(kind_of_round(j, round), [&](auto k) { of_rank += j.count * (decltype(k)::wide ? j.ranks : 1); });
    return of_rank * j.ranks;
}

std::vector<std::byte> contents(const job& j, std::uint64_t seed) {
    std::mt19937_64 any(seed);
    std::vector<std::byte> before(j.ranks * arena);
    std::vector<float> weights(region / sizeof(float) / 2);
    const auto is_seen_beside = [](std::byte* at) { std::fill_n(at, region, std::byte{0xa5}); };  // where a zero isn't
    for (float& w : weights) w = number<float>(any, false) / 8;
    for (std::uint32_t r = 0; r < j.ranks; ++r) {
        std::byte* const a = before.data() + r * arena;
        is_seen_beside(a + out * region);
        is_seen_beside(a + scales * region);
        // A medley's first kind may be a barrier, which brings nothing.
        const std::uint32_t of_medley = is_shared(j.which) ? with_bfloats_together[0] : with_floats_apart[0];
        with_kind(j.medley ? of_medley : j.which, [&](auto k) { fill_arena<decltype(k)>(a, any); });
        std::ranges::copy(weights, array<float>(a, columns));
        // Each rank brings its own copy of a residual that all of them keep.
        std::copy_n(before.data() + residual * region, region, a + residual * region);
        with_kind(j.which, [&](auto k) {
            if constexpr (decltype(k)::block != 0) make_uneven<decltype(k)>(j, a);
            if constexpr (decltype(k)::unequal)
                for (job of = j; of.count + 1 >= j.count && of.count + 1 != 0; --of.count)
                    decltype(k)::write_lengths(of, r, a);
        });
    }
    return before;
}

std::vector<std::byte> on_host(const job& j, std::vector<std::byte> arenas) {
    static host_side side;
    gs::host::node& node = is_shared(j.which) ? side.together : side.apart;
    std::vector<std::byte> room;
    std::byte* const begin = aligned_begin(room, arenas.size());
    std::ranges::copy(arenas, begin);
    gs::communicator group(j.ranks, {.blocks = j.blocks, .slot = gs::bytes{2048}});
    std::vector<gs::device_id> devices;
    std::vector<gs::member> members;
    std::vector<gs::host::stream> streams;
    std::vector<std::byte*> each;
    for (std::uint32_t r = 0; r < j.ranks; ++r) {
        devices.push_back({is_shared(j.which) ? 0 : r});
        members.push_back(group.rank(r));
        streams.push_back(node.make_stream(devices[r]));
        each.push_back(begin + r * arena);
    }
    job patient = j;
    patient.patience = std::chrono::seconds(60);
    const auto code = launch(node.gangs(), std::span<const gs::device_id>(devices), std::span(streams),
                             std::span<const gs::member>(members), patient, each);
    for (auto& s : streams) s.record().wait(gs::never);
    if (code != gs::errc::none || gs::fault_of(members[0]))
        throw std::runtime_error("the host's backend failed: " + to_string(j));
    std::copy_n(begin, arenas.size(), arenas.begin());
    return arenas;
}

namespace {

/// The ranks of a job on the stand-in's devices.
class device_side {
public:
    device_side(const job& j, const std::vector<std::byte>& arenas) : visible_(node_) {
        const bool shared = is_shared(j.which);
        for (std::uint32_t r = 0; r < j.ranks; ++r) devices_.push_back({shared ? 0 : r});
        if (!gs::cuda::connect(node_, devices_)) throw std::runtime_error("not connected");
        bool by_slots = false;
        with_kind(j.which,
                  [&](auto k) { by_slots = detail::works_through_slots<decltype(decltype(k)::body(j, 0, nullptr))>; });
        group_.emplace(
            node_, visible_, devices_,
            gs::communicator_options{.blocks = j.blocks, .slot = gs::bytes{2048}, .first_epoch = j.first_epoch},
            j.pinned && by_slots ? gs::workspaces::on_host : gs::workspaces::on_devices);
        members_ = members_of(*group_);
        ptx::runtime::polled_by_host(members_[0].view().reports, j.ranks * sizeof(detail::host_report));
        for (std::uint32_t r = 0; r < j.ranks; ++r) {
            if (r == 0 || !shared) streams_.push_back(node_.make_stream(devices_[r], gs::priority{}));
            arenas_.push_back(static_cast<std::byte*>(node_.memory(devices_[r]).allocate(arena, 256)));
            stream_of(r).copy(arenas_[r], arenas.data() + r * arena, arena);
        }
        wait();
    }
    device_side(const device_side&) = delete;
    device_side& operator=(const device_side&) = delete;
    ~device_side() {
        for (std::uint32_t r = 0; r < arenas_.size(); ++r)
            (void)node_.memory(devices_[r]).deallocate(arenas_[r], arena, 256);
    }

    using group = gs::device_communicator<gs::cuda::node, gs::cuda::pinned_memory>;
    [[nodiscard]] group& communicator() { return *group_; }
    [[nodiscard]] static std::vector<gs::member> members_of(const group& g) {
        std::vector<gs::member> each;
        for (std::uint32_t r = 0; r < g.size(); ++r) each.push_back(g.rank(r));
        return each;
    }
    [[nodiscard]] std::span<gs::cuda::stream> streams() { return streams_; }
    [[nodiscard]] gs::cuda::stream& stream_of(std::uint32_t r) { return streams_[streams_.size() == 1 ? 0 : r]; }
    [[nodiscard]] const std::vector<gs::member>& members() const { return members_; }

    [[nodiscard]] gs::errc launch(const job& j) {
        return launch_on_devices(node_, devices_, streams_, members_, j, arenas_);
    }
    /// Of the ranks that are left.
    [[nodiscard]] gs::errc launch_rest(const job& j, const std::vector<std::uint32_t>& ranks) {
        const group rest = group_->subgroup(ranks);
        const auto members = members_of(rest);
        std::vector<gs::cuda::stream> streams;
        std::vector<std::byte*> arenas;
        for (const std::uint32_t r : ranks) {
            streams.push_back(node_.make_stream(devices_[r], gs::priority{}));
            arenas.push_back(arenas_[r]);
        }
        const auto code = launch_on_devices(node_, rest.devices(), streams, members, j, arenas);
        for (auto& s : streams) (void)s.record().wait(gs::never);
        return code != gs::errc::none ? code : gs::fault_of(members[0]).code;
    }
    /// Each rank uses its buffers for something else.
    void reuse(const job& j) {
        for (std::uint32_t r = 0; r < j.ranks; ++r)
            for (const part p : {in, out})
                reuse_on_device(stream_of(r), array<std::uint32_t>(arenas_[r], p),
                                array<const std::uint32_t>(arenas_[r], refill), j.threads);
    }
    void wait() {
        for (auto& s : streams_) (void)s.record().wait(gs::never);
    }
    [[nodiscard]] std::vector<std::byte> results() {
        std::vector<std::byte> bytes(arenas_.size() * arena);
        for (std::uint32_t r = 0; r < arenas_.size(); ++r)
            stream_of(r).copy(bytes.data() + r * arena, arenas_[r], arena);
        wait();
        return bytes;
    }

private:
    gs::cuda::node node_;
    gs::cuda::pinned_memory visible_;
    std::vector<gs::device_id> devices_;
    std::optional<group> group_;
    std::vector<gs::member> members_;
    std::vector<gs::cuda::stream> streams_;
    std::vector<std::byte*> arenas_;
};

/// Runs `body` on a machine that starts now, with the runtime's options; everything that went
/// wrong.
template <class Body>
std::string on_machine(const standin::options& devices, const Body& body) {
    standin::reset(devices);
    std::string wrong;
    try {
        wrong = body();
    } catch (const std::exception& e) {
        wrong = std::string(e.what()) + "\n";
    }
    wrong += standin::take_findings();
    standin::reset(roomy);
    return wrong;
}

/// The same on a machine that starts as `s` says.
template <class Body>
std::string on_new_machine(const job& j, const setting& s, const Body& body) {
    ptx::machine_options& o = ptx::runtime::options();
    o.seed = s.seed;
    o.who = s.who;
    o.weak_memory = s.weak_memory;
    o.most_instructions = 30'000'000;
    return on_machine({.devices = is_shared(j.which) ? 1 : j.ranks, .memory = gs::bytes{64 << 20}}, body);
}

}  // namespace

std::string on_bounded_machine(const std::function<std::string()>& body) {
    ptx::runtime::options().most_instructions = 200'000'000;
    return on_machine(roomy, body);
}

std::vector<std::byte> on_devices(const job& j, const std::vector<std::byte>& arenas, const setting& s,
                                  std::string& wrong) {
    std::vector<std::byte> after;
    wrong += on_new_machine(j, s, [&]() -> std::string {
        device_side side(j, arenas);
        const auto code = side.launch(j);
        after = side.results();
        if (code != gs::errc::none) return "refused: " + std::string(gs::to_string(code)) + "\n";
        const auto fault = gs::fault_of(side.members()[0]);
        return fault ? "fault: " + std::string(gs::describe(fault).c_str()) + "\n" : "";
    });
    return after;
}

namespace {

bool ranks_disagree(const std::vector<gs::member>& members) {
    const auto first = gs::fault_of(members[0]);
    return std::ranges::any_of(members, [&](const gs::member& me) {
        const auto fault = gs::fault_of(me);
        return fault.code != first.code || fault.rank != first.rank;
    });
}

/// One run of those failures that are about a certain moment: goes on by steps until `arrived` or,
/// if it is known from a run before, until step `when`; then acts. `steps` becomes how many there
/// were.
template <class Arrived, class Act>
void go_on_until(const Arrived& arrived, std::optional<std::uint64_t> when, std::uint64_t& steps, const Act& act) {
    constexpr std::uint64_t most = 20'000;
    for (steps = 0; steps < most && (when ? steps < *when : !arrived()); ++steps) ptx::runtime::go_on(1);
    act();
}

/// The last rank begins when the others have given up (to know when that is), or just before.
std::string crossing(const job& j, const setting& s, std::optional<std::uint64_t> when, std::uint64_t& steps) {
    return on_new_machine(j, s, [&]() -> std::string {
        const int late = static_cast<int>(j.ranks) - 1;
        device_side side(j, contents(j, s.seed));
        job failing = j;
        failing.rounds = 1;
        failing.patience = gs::ns{1};
        ptx::runtime::freeze(late);
        if (const auto code = side.launch(failing); code != gs::errc::none)
            return "refused: " + std::string(gs::to_string(code)) + "\n";
        const detail::workspace_view& view = side.members()[0].view();
        go_on_until([&] { return view.state(0, 0).closed != 0; }, when, steps, [&] { ptx::runtime::let_go(late); });
        side.reuse(j);  // behind it: each call lets kernels go on
        side.wait();
        return ranks_disagree(side.members()) ? "ranks disagree about the fault\n" : "";
    });
}

/// Rank 0 of a collective that all find mismatched stands still, if it is known when.
std::string stuck(const job& j, const setting& s, std::optional<std::uint64_t> when, std::uint64_t& steps) {
    return on_new_machine(j, s, [&]() -> std::string {
        device_side side(j, contents(j, s.seed));
        std::vector<gs::cuda::stream::reserved_point> points;
        for (auto& stream : side.streams()) points.push_back(stream.reserve());
        job failing = j;
        failing.rounds = 1;
        failing.odd = j.ranks - 1;
        failing.patience = std::chrono::milliseconds(1);
        if (const auto code = side.launch(failing); code != gs::errc::none)
            return "refused: " + std::string(gs::to_string(code)) + "\n";
        (void)side.streams()[0].record().reached();  // all begin
        const detail::workspace_view& view = side.members()[0].view();
        std::string wrong;
        const auto wait_for = [&](std::uint32_t r) {
            (void)side.stream_of(r).record(std::move(points[r])).wait(gs::never);
        };
        go_on_until([&] { return view.state(0, 0).proposal != 0; }, when, steps,
                    [&] {
                        if (!when) return;
                        const bool inside = view.state(0, 0).inside != 0;
                        ptx::runtime::freeze(0);
                        for (std::uint32_t r = 1; r < j.ranks; ++r) wait_for(r);
                        for (std::uint32_t r = 1; r < j.ranks; ++r)
                            if (gs::fault_of(side.members()[r]).buffers_in_use != inside)
                                wrong += "a rank doesn't say whether another one is still there\n";
                        ptx::runtime::let_go(0);
                    });
        side.wait();
        return wrong;
    });
}

/// Twice the same, since a seed is a run: the second time it is known when it comes to it.
template <class Failing>
std::string at_its_moment(const Failing& failing, const job& j, const setting& s, std::uint64_t before) {
    std::uint64_t steps = 0;
    const std::string wrong = failing(j, s, std::nullopt, steps);
    if (!wrong.empty()) return wrong;
    const std::uint64_t when = steps > before ? steps - before : 0;
    return failing(j, s, when, steps);
}

}  // namespace

std::string trouble_when(failure how, const job& j, const setting& s) {
    const bool goes_on_without = how == failure::late || how == failure::aborted;
    const std::uint32_t late = goes_on_without && s.seed % 4 == 3 ? 0 : j.ranks - 1;
    if (how == failure::crossing) return is_shared(j.which) ? "" : at_its_moment(crossing, j, s, 1 + s.seed / 16 % 24);
    if (how == failure::stuck) {
        job small = j;
        small.blocks = 1;
        small.ranks = 2;
        small.root %= small.ranks;
        with_kind(j.which, [&](auto k) {
            if (decltype(k)::unequal) small.root = 0;  // ranks disagree; else the odd one gives up before it meets them
        });
        const setting strict{.who = s.who, .seed = s.seed};
        return is_shared(j.which) || has_no_count(j) ? "" : at_its_moment(stuck, small, strict, 1 + s.seed / 16 % 2);
    }
    return on_new_machine(j, s, [&]() -> std::string {
        device_side side(j, contents(j, s.seed));
        std::string wrong;
        std::vector<gs::cuda::stream::reserved_point> points;
        for (auto& stream : side.streams()) points.push_back(stream.reserve());
        const auto wait_for = [&](std::uint32_t r) {
            (void)side.stream_of(r).record(std::move(points[r])).wait(gs::never);
        };
        const bool shared = is_shared(j.which);
        job failing = j;
        failing.rounds = 1;
        gs::errc expected = gs::errc::deadline_exceeded;
        switch (how) {
            case failure::late:
            case failure::aborted:
                if (shared) return "";  // all ranks in one launch
                failing.patience = std::chrono::microseconds(200);
                if (how == failure::aborted) failing.patience = std::chrono::seconds(100), expected = gs::errc::aborted;
                standin::hold(side.streams()[late].native_handle());
                break;
            case failure::mismatched:
                if (has_no_count(j)) return "";
                expected = gs::errc::mismatch, failing.odd = late;
                break;
            case failure::racing: failing.patience = gs::ns(s.seed % 4096); break;
            case failure::asked_before: expected = gs::errc::kernel_failed; break;
            case failure::ended_midway: expected = gs::errc::aborted; break;
            case failure::crossing:
            case failure::stuck: break;
        }
        const bool any_end = how == failure::racing || how == failure::ended_midway;
        if (how == failure::asked_before) side.communicator().abort(late, expected);
        if (const auto code = side.launch(failing); code != gs::errc::none)
            return "refused: " + std::string(gs::to_string(code)) + "\n";
        if (how == failure::ended_midway) {
            (void)side.streams()[0].record().reached();  // all begin
            ptx::runtime::go_on(s.seed / 16 % (512U << s.seed % 7));
            // The last rank is slow from here until the others have noticed, or are through.
            if (!shared) ptx::runtime::freeze(static_cast<int>(late));
            side.communicator().abort(late, expected);
            std::uint64_t steps = 0;
            const auto closed = [&] { return side.members()[0].view().state(0, 0).closed != 0; };
            if (!shared)
                go_on_until(closed, std::nullopt, steps, [&] { ptx::runtime::let_go(static_cast<int>(late)); });
        }
        if (any_end) side.reuse(j);
        if (how == failure::aborted) {
            // Who drives by looking sees where everybody is.
            const auto first = side.streams()[late == 0 ? 1 : 0].record();
            for (int looks = 0; looks < 1000; ++looks) {
                (void)first.reached();
                const auto where = gs::laggard(side.communicator().progress());
                if (!where || where->rank != late) continue;
                side.communicator().abort(late, gs::errc::aborted);
                break;
            }
        }
        std::vector<std::uint32_t> rest;
        for (std::uint32_t r = 0; r < j.ranks; ++r)
            if (r != late) rest.push_back(r);
        if (goes_on_without) {
            for (const std::uint32_t r : rest) wait_for(r);
            standin::let_go(side.streams()[late].native_handle());
        }
        side.wait();
        if (ranks_disagree(side.members())) wrong += "ranks disagree about the fault\n";
        for (const auto& me : side.members()) {
            const auto fault = gs::fault_of(me);
            if (fault.buffers_in_use) wrong += "somebody never left\n";
            if (!any_end && fault.code != expected)
                wrong += "not the fault that it is: " + std::string(gs::describe(fault).c_str()) + "\n";
        }
        if (how == failure::late && j.ranks > 2) {
            job smaller = j;
            smaller.ranks = j.ranks - 1;
            smaller.root = 0;
            if (const auto code = side.launch_rest(smaller, rest); code != gs::errc::none)
                wrong += "the rest can't go on: " + std::string(gs::to_string(code)) + "\n";
        }
        return wrong;
    });
}

namespace {

/// A device adds a row up in another order than a host (row_sum), so the mean, and what is made of
/// it, may differ by some ulps. What is small beside that is compared with what it is made of; the
/// smallest numbers, whose ulps are large beside them, by these.
bool as_near_as_promised(const job& j, const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                         std::size_t at) {
    if (!in_order_of_threads(j) || at % arena / region != out) return false;
    const auto number = [](const std::vector<std::byte>& of, std::size_t where) {
        float x = 0;
        std::memcpy(&x, of.data() + where, sizeof x);
        return x;
    };
    const std::size_t whole = at / sizeof(float) * sizeof(float);
    const float x = number(a, whole), y = number(b, whole);
    // Weight and offset are the same number, which may be large where their sum isn't.
    const std::size_t column = (at % region / sizeof(float) - j.out_shift) % j.width;
    const float offset = number(a, at / arena * arena + columns * region + column * sizeof(float));
    return std::abs(x - y) <= 1e-5F * (std::abs(y) + std::abs(offset)) + 8 * std::numeric_limits<float>::denorm_min();
}

}  // namespace

std::string trouble(const job& j, const setting& s, const std::vector<std::byte>& before,
                    const std::vector<std::byte>& expected) {
    std::string wrong;
    const auto after = on_devices(j, before, s, wrong);
    std::size_t differing = 0, first = after.size();
    for (std::size_t i = 0; i < after.size(); ++i)
        if (after[i] != expected[i] && !as_near_as_promised(j, after, expected, i) && differing++ == 0) first = i;
    if (differing != 0)
        wrong += std::to_string(differing) + " bytes differ, the first of rank " + std::to_string(first / arena) +
                 ", region " + std::to_string(first % arena / region) + ", at " + std::to_string(first % region) + "\n";
    return wrong;
}

std::string trouble(const job& j, const setting& s) {
    const auto before = contents(j, s.seed);
    return trouble(j, s, before, on_host(j, before));
}

std::string trouble_of_forms() {
    constexpr std::uint32_t n = 300;
    std::vector<std::uint32_t> words(n, 5);
    gs::cuda::node node;
    const gs::device_id device{0};
    auto s = node.make_stream(device, gs::priority{});
    auto* const on_device = static_cast<std::uint32_t*>(node.memory(device).allocate(n * sizeof(std::uint32_t), 64));
    s.copy(on_device, words.data(), n * sizeof(std::uint32_t));
    for (const auto how : {form::chevrons, form::function, form::cooperative_function}) add_one(how, s, on_device, n);
    const auto twice = gs::cuda::capture(s, [&](gs::cuda::stream& captured) {
        add_one(form::chevrons, captured, on_device, n);
        add_one(form::cooperative_function, captured, on_device, n);
    });
    gs::cuda::graph_executable run{twice};
    run.launch(s);
    run.launch(s);
    s.copy(words.data(), on_device, n * sizeof(std::uint32_t));
    const bool waited = s.record().wait(gs::never);
    (void)node.memory(device).deallocate(on_device, n * sizeof(std::uint32_t), 64);
    if (!waited) return "never over\n";
    return words == std::vector<std::uint32_t>(n, 5 + 3 + 2 * 2) ? "" : "not as often as launched\n";
}

namespace {

template <class T>
std::string conversion_trouble(gs::cuda::node& node, gs::cuda::stream& s, format f) {
    const auto pattern = [](std::uint32_t p) { return T::from_bits(static_cast<typename T::bits_type>(p)); };
    std::vector<float> widened(std::size_t{1} << 8 * sizeof(T)), floats{NAN, -NAN, INFINITY, -INFINITY, 3e38F, -3e38F};
    for (std::uint32_t p = 0; p < widened.size(); ++p) {
        const auto low = static_cast<float>(pattern(p)), high = static_cast<float>(pattern(p + 1));
        const float middle = low / 2 + high / 2;
        for (const float x : {low, middle})
            for (const float near : {x, std::nextafter(x, 0.0F), std::nextafter(x, x < 0 ? -INFINITY : INFINITY)})
                floats.push_back(near);
    }
    std::vector<std::uint16_t> narrowed(floats.size());
    auto& memory = node.memory({0});
    const auto bytes_of = [](const auto& v) { return v.size() * sizeof v[0]; };
    auto* const wide = static_cast<float*>(memory.allocate(bytes_of(widened), 64));
    auto* const given = static_cast<float*>(memory.allocate(bytes_of(floats), 64));
    auto* const narrow = static_cast<std::uint16_t*>(memory.allocate(bytes_of(narrowed), 64));
    s.copy(given, floats.data(), bytes_of(floats));
    convert_on_device(f, s, wide, given, narrow, static_cast<std::uint32_t>(floats.size()));
    s.copy(widened.data(), wide, bytes_of(widened));
    s.copy(narrowed.data(), narrow, bytes_of(narrowed));
    (void)s.record().wait(gs::never);
    (void)memory.deallocate(wide, bytes_of(widened), 64);
    (void)memory.deallocate(given, bytes_of(floats), 64);
    (void)memory.deallocate(narrow, bytes_of(narrowed), 64);
    std::size_t off = 0;
    for (std::uint32_t p = 0; p < widened.size(); ++p)
        off += std::bit_cast<std::uint32_t>(widened[p]) == std::bit_cast<std::uint32_t>(static_cast<float>(pattern(p)))
                   ? 0
                   : 1;
    for (std::size_t i = 0; i < floats.size(); ++i) off += narrowed[i] == T(floats[i]).bits() ? 0 : 1;
    return off == 0
               ? ""
               : "format " + std::to_string(static_cast<int>(f)) + ": " + std::to_string(off) + " conversions differ\n";
}

}  // namespace

std::string trouble_of_conversions() {
    gs::cuda::node node;
    auto s = node.make_stream({0}, gs::priority{});
    return conversion_trouble<gs::float16>(node, s, format::float16) +
           conversion_trouble<gs::bfloat16>(node, s, format::bfloat16) +
           conversion_trouble<gs::fp8_e4m3>(node, s, format::fp8_e4m3) +
           conversion_trouble<gs::fp8_e5m2>(node, s, format::fp8_e5m2);
}

namespace {

struct sizes {
    std::size_t few = 512, many = 1536;
};

/// `of_part`: of an array of n elements, count is this part.
cost cost_of(std::string name, job j, std::size_t of_part, double least_bytes, sizes n = {}) {
    const auto work = [&](std::size_t elements) {
        j.count = elements / of_part;
        std::string wrong;
        (void)on_devices(j, contents(j, 1), {}, wrong);
        if (!wrong.empty()) throw std::logic_error(wrong);
    };
    return cost_of_more(
        std::move(name), static_cast<double>((n.many - n.few) * j.ranks), least_bytes, [&] { work(n.few); },
        [&] { work(n.many); });
}

}  // namespace

cost cost_of_more(std::string name, double more, double least_bytes, const std::function<void()>& few,
                  const std::function<void()>& many) {
    const auto work_of = [](const std::function<void()>& work) {
        const auto before = ptx::runtime::total().work;
        work();
        const auto after = ptx::runtime::total().work;
        return std::pair(static_cast<double>(after.instructions - before.instructions),
                         static_cast<double>(after.loaded + after.stored - before.loaded - before.stored));
    };
    const auto [little, few_bytes] = work_of(few);
    const auto [much, many_bytes] = work_of(many);
    return {std::move(name), (much - little) / more, (many_bytes - few_bytes) / more, least_bytes};
}

std::vector<cost> costs() {
    const std::uint32_t sum = number_of<all_reduce<float, gs::sum, false>>();
    const std::uint32_t sum_together = number_of<all_reduce<gs::bfloat16, gs::sum, true>>();
    std::vector<cost> all;
    const auto add = [&](const std::string& name, const job& j, std::size_t of_part, double least, sizes n = {}) {
        all.push_back(cost_of(name + "_of_" + std::to_string(j.ranks), j, of_part, least, n));
    };
    for (const std::uint32_t ranks : {2U, 3U, 4U, 8U}) add("two_shot", {.which = sum, .ranks = ranks}, 1, 8);
    add("two_shot_of_bfloats", {.which = sum_together, .ranks = 4}, 1, 4);
    for (const std::uint32_t ranks : {2U, 4U, 8U})  // what a slot holds
        add("one_shot", {.which = sum, .ranks = ranks, .how = gs::algorithm::one_shot}, 1, 8, {256, 512});
    add("ring", {.which = sum, .ranks = 4, .how = gs::algorithm::ring}, 1, 8);
    add("quantised_two_shot", {.which = number_of<coded_all_reduce<float, gs::sum, 128, false>>(), .ranks = 4}, 1, 8);
    add("reduce_scatter", {.which = number_of<reduce_scatter<float, gs::sum, false>>(), .ranks = 4}, 4, 5);
    add("reduce", {.which = number_of<reduce<float, gs::maximum, false>>(), .ranks = 4}, 1, 5);
    add("all_gather", {.which = number_of<all_gather<gs::bfloat16, false>>(), .ranks = 4}, 4, 4);
    add("broadcast", {.which = number_of<broadcast<float, false>>(), .ranks = 4}, 1, 6);
    add("all_to_all", {.which = number_of<all_to_all<float, false>>(), .ranks = 4}, 4, 8);
    add("all_to_all_in_place", {.which = number_of<all_to_all_in_place<float, false>>(), .ranks = 4}, 4, 6);
    add("all_gatherv", {.which = number_of<all_gatherv<float, false>>(), .ranks = 4}, 4, 6);
    add("reduce_scatterv", {.which = number_of<reduce_scatterv<float, gs::sum, false>>(), .ranks = 4}, 4, 3.75);
    add("all_to_allv", {.which = number_of<all_to_allv<float, false>>(), .ranks = 4}, 4, 6);
    const std::uint32_t finish = number_of<fused<gs::bfloat16, normed, false, false>>();
    for (const std::uint32_t ranks : {4U, 8U})  // a residual and weights by the row's owner, the rest by everyone
        add("add_norm_cast", {.which = finish, .ranks = ranks, .width = 128}, 1, 6 + 6.0 / ranks);
    add("add_norm_cast_by_one_shot", {.which = finish, .ranks = 4, .width = 128, .how = gs::algorithm::one_shot}, 1,
        6 + 6.0 / 4, {256, 512});
    add("quantise", {.which = number_of<fused<gs::bfloat16, quantised, false, true>>(), .ranks = 4, .width = 128}, 1,
        3);
    add("add_norm_quantise_groups",
        {.which = number_of<fused<gs::bfloat16, grouped, false, false>>(), .ranks = 4, .width = 128}, 1,
        3 + 6.0 / 4 + 4.0 / 128);
    add("quantise_nvfp4", {.which = number_of<fused<float, in_four_bits, false, true>>(), .ranks = 4, .width = 128}, 1,
        4 + 0.5 + 1.0 / 16);
    return all;
}

}  // namespace jobs
