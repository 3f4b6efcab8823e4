// SPDX-License-Identifier: Apache-2.0
// The collectives besides all-reduce on streams: results by definition, in any shape, and their
// failures.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/submit.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace submit_collectives_test {

using namespace std::chrono_literals;
namespace gs = gpushare;
using gs::errc;

namespace {

enum class what : std::uint8_t {
    reduce_scatter,
    all_gather,
    all_to_all,
    broadcast,
    reduce,
    all_gatherv,
    reduce_scatterv,
    all_to_allv
};
constexpr std::uint32_t kinds = 8, most_ranks = 5, most_blocks = 3;

struct shape {
    what kind = what::reduce_scatter;
    std::uint32_t ranks = 2, root = 0, blocks = 0;
    std::size_t count = 0;
    bool shared = false, in_place = false;
    // counts[r][q]: what rank r has for rank q. Of collectives that aren't all_to_allv, all rows
    // are the same.
    std::vector<std::vector<std::uint64_t>> counts{};
};

std::uint64_t total(const std::vector<std::uint64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}
std::uint64_t begin(const std::vector<std::uint64_t>& counts, std::uint32_t r) {
    return std::accumulate(counts.begin(), counts.begin() + r, std::uint64_t{0});
}
std::vector<std::uint64_t> column(const shape& s, std::uint32_t q) {
    std::vector<std::uint64_t> all;
    for (const auto& row : s.counts) all.push_back(row[q]);
    return all;
}
bool is_unequal(what kind) { return kind >= what::all_gatherv; }
bool combines(what kind) {
    return kind == what::reduce_scatter || kind == what::reduce || kind == what::reduce_scatterv;
}

shape random_shape(support::random& any) {
    shape s;
    s.kind = static_cast<what>(any.below(kinds));
    s.ranks = static_cast<std::uint32_t>(1 + any.below(most_ranks));
    s.root = static_cast<std::uint32_t>(any.below(s.ranks));
    s.blocks = static_cast<std::uint32_t>(any.below(most_blocks + 1));
    s.count = any.one_in(6) ? 0 : any.below(any.one_in(4) ? 3000 : 100);
    s.shared = any.one_in(2);
    s.in_place = any.one_in(2) && s.kind != what::all_to_allv;
    const auto row = [&] {
        std::vector<std::uint64_t> counts(s.ranks);
        for (auto& c : counts) c = any.one_in(3) ? 0 : any.below(s.count + 2);
        return counts;
    };
    s.counts.assign(s.ranks, row());
    if (s.kind == what::all_to_allv)
        for (auto& r : s.counts) r = row();
    return s;
}

/// The arrays of all ranks, one element longer than what a collective touches.
struct arrays {
    std::vector<std::vector<float>> in, out;
    friend bool operator==(const arrays&, const arrays&) = default;
};
std::size_t in_size(const shape& s, std::uint32_t r) {
    switch (s.kind) {
        case what::all_gather:
        case what::broadcast:
        case what::reduce: return s.count;
        case what::reduce_scatter:
        case what::all_to_all: return s.count * s.ranks;
        case what::all_gatherv: return s.counts[r][r];
        case what::reduce_scatterv:
        case what::all_to_allv: return total(s.counts[r]);
    }
    return 0;
}
std::size_t out_size(const shape& s, std::uint32_t r) {
    switch (s.kind) {
        case what::reduce_scatter:
        case what::broadcast:
        case what::reduce: return s.count;
        case what::all_gather:
        case what::all_to_all: return s.count * s.ranks;
        case what::all_gatherv: return total(s.counts[r]);
        case what::reduce_scatterv: return s.counts[r][r];
        case what::all_to_allv: return total(column(s, r));
    }
    return 0;
}
arrays filled(const shape& s, support::random& any) {
    arrays a;
    for (std::uint32_t r = 0; r < s.ranks; ++r) {
        a.in.emplace_back(in_size(s, r) + 1);
        a.out.emplace_back(out_size(s, r) + 1);
        for (auto* const x : {&a.in.back(), &a.out.back()})
            for (float& f : *x) f = static_cast<float>(any.below(100'000)) * 1.7e-3F;
    }
    return a;
}

struct pointers {
    std::vector<float*> ins, outs;
};
/// Where ranks' inputs and outputs lie: in place, an output is a part of an input, or the other way
/// round.
pointers of(const shape& s, arrays& a) {
    pointers p;
    for (std::uint32_t r = 0; r < s.ranks; ++r) {
        float *in = a.in[r].data(), *out = a.out[r].data();
        const std::size_t part = is_unequal(s.kind) ? begin(s.counts[r], r) : r * s.count;
        if (s.in_place && (s.kind == what::reduce_scatter || s.kind == what::reduce_scatterv)) out = in + part;
        if (s.in_place && (s.kind == what::all_gather || s.kind == what::all_gatherv)) in = out + part;
        if (s.kind == what::broadcast || (s.in_place && (s.kind == what::all_to_all || s.kind == what::reduce)))
            out = in;
        p.ins.push_back(in);
        p.outs.push_back(out);
    }
    return p;
}

/// What the arrays hold behind a collective: by its definition.
arrays defined(const shape& s, const arrays& before) {
    arrays read = before, result = before;
    const pointers from = of(s, read), to = of(s, result);
    const auto copy = [&](std::uint32_t source, std::size_t first, std::uint32_t rank, std::size_t at, std::size_t n) {
        std::copy_n(from.ins[source] + first, n, to.outs[rank] + at);
    };
    for (std::uint32_t r = 0; r < s.ranks; ++r) {
        const std::vector<std::uint64_t> gets = s.kind == what::all_to_allv ? column(s, r) : s.counts[r];
        const std::size_t n = is_unequal(s.kind) ? s.counts[r][r] : s.count;
        const std::size_t part = is_unequal(s.kind) ? begin(s.counts[r], r) : r * s.count;
        if (combines(s.kind) && (s.kind != what::reduce || r == s.root))
            gs::combine(
                s.ranks,
                [&](std::uint32_t q) -> const float* { return from.ins[q] + (s.kind == what::reduce ? 0 : part); },
                std::span(to.outs[r], n));
        if (s.kind == what::broadcast) copy(s.root, 0, r, 0, n);
        for (std::uint32_t q = 0; q < s.ranks; ++q) {
            if (s.kind == what::all_gather) copy(q, 0, r, q * n, n);
            if (s.kind == what::all_to_all) copy(q, r * n, r, q * n, n);
            if (s.kind == what::all_gatherv) copy(q, 0, r, begin(gets, q), gets[q]);
            if (s.kind == what::all_to_allv) copy(q, begin(s.counts[q], r), r, begin(gets, q), gets[q]);
        }
    }
    return result;
}

/// Nodes and groups for any shape.
class machine {
public:
    machine() {
        for (std::uint32_t r = 0; r < most_ranks; ++r) {
            devices_.push_back({r});
            streams_.push_back(apart_.make_stream({r}));
            groups_.emplace_back(r + 1, gs::communicator_options{.blocks = most_blocks});
        }
        streams_.push_back(together_.make_stream({0}));
    }
    /// Submits it to streams, and waits. `patience` as in launch_options.
    errc run(const shape& s, arrays& a, gs::ns patience = 5min) {
        const errc code = submit(s, a, patience);
        for (auto& stream : streams_) stream.record().wait(gs::never);
        return code;
    }
    errc submit(const shape& s, arrays& a, gs::ns patience = 5min) {
        const pointers p = of(s, a);
        sends_ = s.counts;
        receives_.clear();
        for (std::uint32_t r = 0; r < s.ranks; ++r) receives_.push_back(column(s, r));
        const gs::launch_options options{.blocks = s.blocks, .patience = patience};
        const auto members = members_of(s.ranks);
        const std::span<const gs::device_id> devices(devices_.data(), s.ranks);
        const std::span<gs::host::stream> streams(streams_.data(), s.ranks);
        const std::vector<const float*> ins(p.ins.begin(), p.ins.end());
        std::vector<std::span<const float>> from;
        std::vector<std::span<float>> to;
        std::vector<const std::uint64_t*> sends, receives;
        for (std::uint32_t r = 0; r < s.ranks; ++r) {
            from.emplace_back(p.ins[r], in_size(s, r));
            to.emplace_back(p.outs[r], out_size(s, r));
            sends.push_back(sends_[r].data());
            receives.push_back(receives_[r].data());
        }
        auto& gangs = s.shared ? together_.gangs() : apart_.gangs();
        auto& one = streams_[most_ranks];
        const gs::device_id d{0};
        switch (s.kind) {
            case what::reduce_scatter:
                return s.shared ? gs::submit_shared_reduce_scatter<float>(gangs, d, one, members, ins, p.outs, s.count,
                                                                          gs::sum{}, options)
                                : gs::submit_reduce_scatter<float>(gangs, devices, streams, members, ins, p.outs,
                                                                   s.count, gs::sum{}, options);
            case what::all_gather:
                return s.shared
                           ? gs::submit_shared_all_gather<float>(gangs, d, one, members, ins, p.outs, s.count, options)
                           : gs::submit_all_gather<float>(gangs, devices, streams, members, ins, p.outs, s.count,
                                                          options);
            case what::all_to_all:
                return s.shared
                           ? gs::submit_shared_all_to_all<float>(gangs, d, one, members, ins, p.outs, s.count, options)
                           : gs::submit_all_to_all<float>(gangs, devices, streams, members, ins, p.outs, s.count,
                                                          options);
            case what::broadcast:
                return s.shared ? gs::submit_shared_broadcast<float>(gangs, d, one, members, p.outs, s.count, s.root,
                                                                     options)
                                : gs::submit_broadcast<float>(gangs, devices, streams, members, p.outs, s.count, s.root,
                                                              options);
            case what::reduce:
                return s.shared ? gs::submit_shared_reduce<float>(gangs, d, one, members, ins, p.outs, s.count, s.root,
                                                                  gs::sum{}, options)
                                : gs::submit_reduce<float>(gangs, devices, streams, members, ins, p.outs, s.count,
                                                           s.root, gs::sum{}, options);
            case what::all_gatherv:
                return s.shared
                           ? gs::submit_shared_all_gatherv<float>(gangs, d, one, members, from, to, sends, options)
                           : gs::submit_all_gatherv<float>(gangs, devices, streams, members, from, to, sends, options);
            case what::reduce_scatterv:
                return s.shared ? gs::submit_shared_reduce_scatterv<float>(gangs, d, one, members, from, to, sends,
                                                                           gs::sum{}, options)
                                : gs::submit_reduce_scatterv<float>(gangs, devices, streams, members, from, to, sends,
                                                                    gs::sum{}, options);
            case what::all_to_allv:
                return s.shared ? gs::submit_shared_all_to_allv<float>(gangs, d, one, members, from, to, sends,
                                                                       receives, options)
                                : gs::submit_all_to_allv<float>(gangs, devices, streams, members, from, to, sends,
                                                                receives, options);
        }
        return errc::not_supported;
    }
    [[nodiscard]] gs::communicator& group(std::uint32_t ranks) { return groups_[ranks - 1]; }
    [[nodiscard]] std::vector<gs::member> members_of(std::uint32_t ranks) {
        std::vector<gs::member> members;
        for (std::uint32_t r = 0; r < ranks; ++r) members.push_back(group(ranks).rank(r));
        return members;
    }
    [[nodiscard]] gs::host::node& apart() { return apart_; }
    [[nodiscard]] std::vector<gs::host::stream>& streams() { return streams_; }
    [[nodiscard]] std::vector<std::vector<std::uint64_t>>& receives() { return receives_; }

private:
    gs::host::node apart_{{.devices = most_ranks, .sms = most_blocks}};
    gs::host::node together_{{.devices = 1, .sms = most_ranks * most_blocks}};
    std::vector<gs::device_id> devices_;
    std::vector<gs::host::stream> streams_;  // one for each device apart, then the one that all share
    std::vector<gs::communicator> groups_;   // of 1 rank, 2 ranks, ...
    std::vector<std::vector<std::uint64_t>> sends_, receives_;
};

std::string to_string(const shape& s) {
    std::string text = "kind " + std::to_string(static_cast<int>(s.kind)) + ", ranks " + std::to_string(s.ranks) +
                       ", root " + std::to_string(s.root) + ", blocks " + std::to_string(s.blocks) + ", count " +
                       std::to_string(s.count) + (s.shared ? ", shared" : "") + (s.in_place ? ", in place" : "");
    for (const auto& row : s.counts) {
        text += ", counts";
        for (const auto c : row) text += " " + std::to_string(c);
    }
    return text;
}

/// Of each kind, with parts that aren't empty.
shape plain_shape(std::uint32_t kind, std::uint32_t ranks = 3) {
    shape s{.kind = static_cast<what>(kind), .ranks = ranks, .root = 1, .blocks = 1, .count = 40};
    s.counts.assign(ranks, std::vector<std::uint64_t>(ranks, 40));
    return s;
}

}  // namespace

TEST_CASE("collectives on streams match their definition in every shape, with the bits of rank threads",
          "[collective]") {
    machine m;
    std::vector<std::uint32_t> seen(kinds);
    for (std::uint64_t n = 0; n < support::few(std::uint64_t{400}); ++n) {
        const auto seed = support::seed(n);
        support::random any(seed);
        const shape s = random_shape(any);
        CAPTURE(seed, to_string(s));
        const arrays before = filled(s, any);
        arrays a = before;
        REQUIRE(m.run(s, a) == errc::none);
        REQUIRE_FALSE(gs::fault_of(m.group(s.ranks).rank(0)));
        REQUIRE(a == defined(s, before));
        ++seen[static_cast<std::size_t>(s.kind)];
    }
    CHECK(*std::ranges::min_element(seen) > 0);
}

TEST_CASE("a number of blocks that is left open is the table's in every collective", "[collective]") {
    for (std::uint32_t kind = 0; kind < kinds; ++kind) {
        machine m;
        shape s = plain_shape(kind);
        s.blocks = 0;
        m.group(3).set_tuning(gs::tuning_table::always({gs::algorithm::ring, false, 1, 0, 2}));
        support::random any(kind);
        const arrays before = filled(s, any);
        arrays a = before;
        CAPTURE(kind);
        REQUIRE(m.run(s, a) == errc::none);
        CHECK(a == defined(s, before));
        const auto& view = m.group(3).rank(0).view();
        CHECK(view.state(0, 1).epoch == 1);
        CHECK(view.state(0, 2).epoch == 0);
    }
}

TEST_CASE("a rank that is late in any collective is named, and an abort names the given rank", "[collective]") {
    for (std::uint32_t kind = 0; kind < kinds; ++kind)
        for (const bool aborted : {false, true}) {
            machine m;
            const shape s = plain_shape(kind);
            support::random any(kind);
            arrays a = filled(s, any);
            auto faults = m.apart().faults({2});
            faults.stall(m.streams()[2]);
            CAPTURE(kind, aborted);
            REQUIRE(m.submit(s, a, aborted ? gs::ns(100s) : gs::ns(200ms)) == errc::none);
            if (aborted) m.group(3).abort(2);
            m.streams()[0].record().wait(gs::never);
            m.streams()[1].record().wait(gs::never);
            const auto fault = gs::fault_of(m.group(3).rank(0));
            CHECK(fault.code == (aborted ? errc::aborted : errc::deadline_exceeded));
            CHECK(fault.rank == 2);
            if (!aborted) CHECK(to_string(fault.what) == gs::to_string(m.group(3).progress()[0].what));
            faults.resume(m.streams()[2]);
            for (auto& stream : m.streams()) stream.record().wait(gs::never);
            CHECK(gs::fault_of(m.group(3).rank(2)) == fault);
        }
}

TEST_CASE("lengths that don't fit end a collective of unequal parts before anything is written", "[collective]") {
    for (const what kind : {what::all_gatherv, what::reduce_scatterv, what::all_to_allv})
        for (const std::uint64_t by : {std::uint64_t{1}, ~std::uint64_t{0}, ~std::uint64_t{0} - 50}) {
            machine m;
            shape s = plain_shape(static_cast<std::uint32_t>(kind));
            support::random any(1);
            const arrays before = filled(s, any);
            arrays a = before;
            // Of all_to_allv, what rank 0 has for rank 1, who expects as much: sums that wrap
            // around fit.
            const bool by_pair = kind == what::all_to_allv;
            const std::uint64_t length = by == 1 ? 41 : by;
            auto wrong = s.counts, expected = s.counts;
            for (auto& row : wrong)
                if (!by_pair || &row == &wrong.front()) row[1] = length;
            expected[1][0] = length;
            const std::size_t in_room = in_size(s, 0), out_room = out_size(s, 0);
            CAPTURE(static_cast<int>(kind), by);
            const pointers p = of(s, a);
            std::vector<std::span<const float>> from;
            std::vector<std::span<float>> to;
            std::vector<const std::uint64_t*> counts, receives;
            for (std::uint32_t r = 0; r < 3; ++r) {
                from.emplace_back(p.ins[r], in_room);
                to.emplace_back(p.outs[r], out_room);
                counts.push_back(wrong[r].data());
                receives.push_back(expected[r].data());
            }
            const auto members = m.members_of(3);
            const std::vector<gs::device_id> devices{{0}, {1}, {2}};
            auto& gangs = m.apart().gangs();
            const std::span<gs::host::stream> streams(m.streams().data(), 3);
            const errc code =
                kind == what::all_gatherv
                    ? gs::submit_all_gatherv<float>(gangs, devices, streams, members, from, to, counts)
                : kind == what::reduce_scatterv
                    ? gs::submit_reduce_scatterv<float>(gangs, devices, streams, members, from, to, counts)
                    : gs::submit_all_to_allv<float>(gangs, devices, streams, members, from, to, counts, receives);
            REQUIRE(code == errc::none);
            for (auto& stream : m.streams()) stream.record().wait(gs::never);
            CHECK(gs::fault_of(members[0]).code == errc::mismatch);
            CHECK(a == before);
        }
}

TEST_CASE("ranks on streams that disagree about a length all fail", "[collective]") {
    machine m;
    shape s = plain_shape(static_cast<std::uint32_t>(what::all_to_allv));
    support::random any(1);
    arrays a = filled(s, any);
    s.counts[2][0] = 39;  // and rank 0 expects 40 of it
    const pointers p = of(s, a);
    std::vector<std::span<const float>> from;
    std::vector<std::span<float>> to;
    const std::vector<std::uint64_t> expected(3, 40);
    std::vector<const std::uint64_t*> sends, receives(3, expected.data());
    for (std::uint32_t r = 0; r < 3; ++r) {
        from.emplace_back(p.ins[r], 120);
        to.emplace_back(p.outs[r], 120);
        sends.push_back(s.counts[r].data());
    }
    const auto members = m.members_of(3);
    const std::vector<gs::device_id> devices{{0}, {1}, {2}};
    REQUIRE(gs::submit_all_to_allv<float>(m.apart().gangs(), devices, std::span(m.streams()).first(3), members, from,
                                          to, sends, receives) == errc::none);
    for (auto& stream : m.streams()) stream.record().wait(gs::never);
    for (const auto& me : members)
        CHECK(gs::fault_of(me) == gs::collective_fault{errc::mismatch, gs::collective_kind::all_to_all, 2, 1});
}

TEST_CASE("a call that makes no sense is refused before anything is launched", "[collective]") {
    machine m;
    std::vector<float> x(100), y(100);
    const std::vector<const float*> ins{x.data(), y.data()};
    const std::vector<float*> outs{x.data() + 50, y.data() + 50}, mixed{x.data(), y.data() + 50};
    const std::vector<gs::device_id> devices{{0}, {1}};
    const auto members = m.members_of(2);
    auto& gangs = m.apart().gangs();
    const std::span<gs::host::stream> streams(m.streams().data(), 2);
    const auto one = [](const auto& all) { return std::span(all).first(1); };
    CHECK(gs::submit_reduce_scatter<float>(gangs, devices, streams, members, one(ins), outs, 5) ==
          errc::invalid_specification);
    CHECK(gs::submit_all_gather<float>(gangs, devices, streams, members, ins, one(outs), 5) ==
          errc::invalid_specification);
    CHECK(gs::submit_all_to_all<float>(gangs, devices, streams, members, ins, mixed, 5) == errc::invalid_specification);
    CHECK(gs::submit_broadcast<float>(gangs, devices, streams, members, outs, 5, 2) == errc::invalid_specification);
    CHECK(gs::submit_reduce<float>(gangs, devices, streams, members, ins, outs, 5, 2) == errc::invalid_specification);
    CHECK(gs::submit_reduce<float>(gangs, devices, streams, members, ins, outs, 5, 1, gs::sum{}, {.blocks = 9}) ==
          errc::invalid_specification);
    const std::vector<std::span<const float>> from{{x.data(), 2}, {y.data(), 2}};
    const std::vector<std::span<float>> to{{x.data(), 4}, {y.data(), 4}};
    const std::vector<std::uint64_t> counts{1, 1};
    const std::vector<const std::uint64_t*> good{counts.data(), counts.data()}, bad{counts.data(), nullptr};
    CHECK(gs::submit_all_gatherv<float>(gangs, devices, streams, members, from, to, bad) ==
          errc::invalid_specification);
    CHECK(gs::submit_all_to_allv<float>(gangs, devices, streams, members, from, to, good, bad) ==
          errc::invalid_specification);
    CHECK(gs::submit_reduce_scatterv<float>(gangs, devices, streams, members, one(from), to, good) ==
          errc::invalid_specification);
    CHECK(m.group(2).progress()[0].epoch == 0);
}

}  // namespace submit_collectives_test
