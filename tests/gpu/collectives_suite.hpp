// SPDX-License-Identifier: Apache-2.0
// Collectives on devices: every type, every collective, captured ones, workspaces in pinned memory,
// aborts and deadlines, in a partition, on several devices. For a file that can launch kernels on
// cuda::stream and includes the headers for that first: collectives_test.cu for devices,
// collectives_rehearsal.cpp over the stand-in.
#pragma once

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/collective/fused_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/numbers.hpp>

#include "gpu/collectives_setting.hpp"
#include "support/catch.hpp"

namespace collectives_suite {

using namespace std::chrono_literals;
namespace cu = gpushare::cuda;
namespace gs = gpushare;
using gs::algorithm;
using gs::errc;

/// An array of each rank, on its device.
template <class T>
class rank_arrays {
public:
    rank_arrays(cu::node& node, std::span<const gs::device_id> devices, std::size_t of_rank)
        : node_(&node), devices_(devices), size_(of_rank) {
        for (const gs::device_id d : devices)
            arrays_.push_back(static_cast<T*>(node.memory(d).allocate(of_rank * sizeof(T), 256)));
    }
    rank_arrays(const rank_arrays&) = delete;
    rank_arrays& operator=(const rank_arrays&) = delete;
    ~rank_arrays() {
        for (std::size_t r = 0; r < arrays_.size(); ++r)
            (void)node_->memory(devices_[r]).deallocate(arrays_[r], size_ * sizeof(T), 256);
    }
    [[nodiscard]] T* operator[](std::size_t r) const { return arrays_[r]; }
    [[nodiscard]] std::span<T* const> all() const { return arrays_; }
    [[nodiscard]] std::vector<const T*> inputs() const { return {arrays_.begin(), arrays_.end()}; }
    /// x[i] of rank r becomes of(r, i).
    template <class Of>
    void fill(const Of& of) {
        std::vector<T> values(size_);
        for (std::size_t r = 0; r < arrays_.size(); ++r) {
            for (std::size_t i = 0; i < size_; ++i) values[i] = of(r, i);
            move(r, arrays_[r], values.data());
        }
    }
    /// How many elements of rank r aren't of(i), by their bytes.
    template <class Of>
    [[nodiscard]] std::size_t off(std::size_t r, const Of& of) const {
        std::vector<T> values(size_);
        move(r, values.data(), arrays_[r]);
        std::size_t n = 0;
        for (std::size_t i = 0; i < size_; ++i) {
            const T wanted = of(i);
            n += std::memcmp(&values[i], &wanted, sizeof(T)) != 0 ? 1 : 0;
        }
        return n;
    }

private:
    void move(std::size_t r, void* to, const void* from) const {
        auto s = node_->make_stream(devices_[r]);
        s.copy(to, from, size_ * sizeof(T));
        CHECK(s.record().wait(gs::never));
    }

    cu::node* node_;
    std::span<const gs::device_id> devices_;
    std::size_t size_;
    std::vector<T*> arrays_;
};

/// A group of ranks, each on one of these devices.
struct rig {
    explicit rig(std::vector<gs::device_id> of_ranks, gs::workspaces where = gs::workspaces::on_devices,
                 std::uint32_t blocks = 4)
        : devices(std::move(of_ranks)), group(node, visible, devices, {.blocks = blocks}, where) {
        for (std::uint32_t r = 0; r < group.size(); ++r) {
            members.push_back(group.rank(r));
            streams.push_back(node.make_stream(devices[r]));
        }
    }
    /// All ranks on the first device.
    explicit rig(std::uint32_t ranks, gs::workspaces where = gs::workspaces::on_devices)
        : rig(std::vector<gs::device_id>(ranks, gs::device_id{0}), where) {}

    [[nodiscard]] cu::stream& stream() { return streams[0]; }
    template <class T>
    errc all_reduce(cu::stream& on, const rank_arrays<T>& in, const rank_arrays<T>& out, std::size_t n,
                    const gs::launch_options& options = {.threads = 128}) {
        const auto inputs = in.inputs();
        return gs::submit_shared_all_reduce<T>(node.gangs(), devices[0], on, members, inputs, out.all(), n, gs::sum{},
                                               options);
    }
    template <class BodyOf>
    errc submit(const BodyOf& body_of, std::uint32_t blocks = 2) {
        std::vector<decltype(body_of(std::size_t{0}))> bodies;
        for (std::size_t r = 0; r < members.size(); ++r) bodies.push_back(body_of(r));
        return gs::submit_shared(node.gangs(), devices[0], stream(), std::span<const gs::member>(members),
                                 std::span<const decltype(body_of(std::size_t{0}))>(bodies),
                                 {.blocks = blocks, .threads = 128});
    }
    [[nodiscard]] errc result() {
        for (auto& s : streams) CHECK(s.record().wait(gs::never));
        return gs::fault_of(members[0]).code;
    }

    cu::node node;
    cu::pinned_memory visible{node};
    const std::vector<gs::device_id> devices;
    gs::device_communicator<cu::node, cu::pinned_memory> group;
    std::vector<gs::member> members;
    std::vector<cu::stream> streams;
};

/// Catch2 2.13 can't skip: what this device or driver can't do is said, and is no failure.
template <class F>
void as_far_as_supported(const F& f) {
    try {
        if (has_kernels())
            f();
        else
            WARN("not supported: the kernels are for devices of compute capability " << least_capability / 10 << "."
                                                                                     << least_capability % 10);
    } catch (const gs::operation_error& e) {
        if (e.code() != errc::not_supported) throw;
        WARN("not supported: " << e.what());
    }
}
inline std::uint32_t num_devices() { return cu::node{}.num_devices(); }

/// So small that sums of eight are exact in every type.
inline float element(std::size_t rank, std::size_t i) { return static_cast<float>((i * 7 + rank * 5) % 3) - 1; }
inline float sum_of(std::size_t ranks, std::size_t i) {
    float sum = 0;
    for (std::size_t r = 0; r < ranks; ++r) sum += element(r, i);
    return sum;
}

constexpr std::size_t odd_size = 3001;

template <class T>
void check_sums(std::uint32_t ranks) {
    rig g(ranks);
    rank_arrays<T> in(g.node, g.devices, odd_size), out(g.node, g.devices, odd_size);
    in.fill([](std::size_t r, std::size_t i) { return static_cast<T>(element(r, i)); });
    REQUIRE(g.all_reduce(g.stream(), in, out, odd_size) == errc::none);
    REQUIRE(g.result() == errc::none);
    for (std::uint32_t r = 0; r < ranks; ++r)
        CHECK(out.off(r, [&](std::size_t i) { return static_cast<T>(sum_of(ranks, i)); }) == 0);
}

/// The same sums, of which each rank gets a part: a lighter kernel. Of numbers that unsigned types
/// have, too.
template <class T>
void check_scattered(std::uint32_t ranks) {
    constexpr std::size_t n = 777;
    rig g(ranks);
    rank_arrays<T> in(g.node, g.devices, ranks * n), out(g.node, g.devices, n);
    in.fill([](std::size_t r, std::size_t i) { return static_cast<T>(element(r, i) + 1); });
    REQUIRE(g.submit([&](std::size_t r) {
        return gs::detail::reduce_scatter_body<T, gs::sum>{in[r], out[r], n, {}};
    }) == errc::none);
    REQUIRE(g.result() == errc::none);
    for (std::uint32_t r = 0; r < ranks; ++r)
        CHECK(out.off(r, [&](std::size_t i) {
            return static_cast<T>(sum_of(ranks, r * n + i) + static_cast<float>(ranks));
        }) == 0);
}

/// A rank that is alone, and waits for the others, with such a patience.
inline void launch_alone(rig& g, gs::ns patience) {
    using body = gs::detail::barrier_body;
    const gs::detail::rank_kernel<body> kernel{g.members[0].view(), 0, patience.count(), g.members[0].asked(), {}};
    REQUIRE(g.stream().launch_cooperative({.blocks = 1, .threads = 64, .hold = {}}, kernel) == errc::none);
}

}  // namespace collectives_suite

TEST_CASE("sums of every type", "[gpu][collective]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        check_sums<double>(2);
        check_sums<float>(4);
        check_sums<gs::float16>(8);
        check_sums<gs::bfloat16>(3);
        check_sums<gs::fp8_e4m3>(2);
        check_sums<gs::fp8_e5m2>(4);
        check_sums<std::int8_t>(8);
        check_sums<std::int64_t>(4);
        check_scattered<std::uint8_t>(2);
        check_scattered<std::int16_t>(3);
        check_scattered<std::uint16_t>(4);
        check_scattered<std::int32_t>(8);
        check_scattered<std::uint32_t>(2);
        check_scattered<std::uint64_t>(4);
    });
}

TEST_CASE("the other collectives", "[gpu][collective]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        constexpr std::uint32_t ranks = 4;
        constexpr std::size_t n = 777;
        rig g(ranks);
        rank_arrays<float> in(g.node, g.devices, ranks * n), out(g.node, g.devices, ranks * n),
            one(g.node, g.devices, n);
        const auto filled = [&] {
            in.fill([](std::size_t r, std::size_t i) { return element(r, i); });
            out.fill([](std::size_t, std::size_t) { return -7.0F; });
            one.fill([](std::size_t r, std::size_t i) { return element(r, i); });
        };
        const auto off = [](const rank_arrays<float>& a, const auto& wanted) {
            std::size_t sum = 0;
            for (std::size_t r = 0; r < ranks; ++r) sum += a.off(r, [&](std::size_t i) { return wanted(r, i); });
            return sum;
        };
        auto& gangs = g.node.gangs();
        const gs::device_id d = g.devices[0];
        const auto ins = in.inputs(), ones = one.inputs();
        const gs::launch_options options{.blocks = 2, .threads = 128};
        filled();
        REQUIRE(gs::submit_shared_reduce_scatter<float>(gangs, d, g.stream(), g.members, ins, one.all(), n, gs::sum{},
                                                        options) == errc::none);
        CHECK(g.result() == errc::none);
        CHECK(off(one, [&](std::size_t r, std::size_t i) { return sum_of(ranks, r * n + i); }) == 0);
        filled();
        REQUIRE(gs::submit_shared_all_gather<float>(gangs, d, g.stream(), g.members, ones, out.all(), n, options) ==
                errc::none);
        CHECK(g.result() == errc::none);
        CHECK(off(out, [&](std::size_t, std::size_t i) { return element(i / n, i % n); }) == 0);
        const auto swapped = [](std::size_t r, std::size_t i) { return element(i / n, r * n + i % n); };
        REQUIRE(gs::submit_shared_all_to_all<float>(gangs, d, g.stream(), g.members, ins, out.all(), n, options) ==
                errc::none);
        CHECK(g.result() == errc::none);
        CHECK(off(out, swapped) == 0);
        REQUIRE(gs::submit_shared_reduce<float>(gangs, d, g.stream(), g.members, ins, out.all(), ranks * n, 2,
                                                gs::maximum{}, options) == errc::none);
        CHECK(g.result() == errc::none);
        CHECK(out.off(2, [&](std::size_t i) {
            float most = -1;
            for (std::size_t r = 0; r < ranks; ++r) most = element(r, i) > most ? element(r, i) : most;
            return most;
        }) == 0);
        REQUIRE(gs::submit_shared_all_to_all<float>(gangs, d, g.stream(), g.members, ins, in.all(), n, options) ==
                errc::none);
        CHECK(g.result() == errc::none);
        CHECK(off(in, swapped) == 0);
        REQUIRE(gs::submit_shared_broadcast<float>(gangs, d, g.stream(), g.members, one.all(), n, 1, options) ==
                errc::none);
        CHECK(g.result() == errc::none);
        CHECK(off(one, [&](std::size_t, std::size_t i) { return element(1, i); }) == 0);
        REQUIRE(g.submit([](std::size_t) { return gs::detail::barrier_body{}; }) == errc::none);
        CHECK(g.result() == errc::none);
    });
}

TEST_CASE("collectives of unequal parts, whose lengths lie on the device", "[gpu][collective]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        constexpr std::uint32_t ranks = 3;
        constexpr std::size_t room = 2000;
        constexpr std::array<std::uint64_t, ranks> of{700, 0, 301}, begins{0, 700, 700};
        constexpr std::size_t total = 1001;
        rig g(ranks);
        rank_arrays<float> in(g.node, g.devices, room), out(g.node, g.devices, room);
        rank_arrays<std::uint64_t> counts(g.node, g.devices, ranks), pairs(g.node, g.devices, ranks);
        std::vector<std::span<const float>> ins;
        std::vector<std::span<float>> outs;
        for (std::uint32_t r = 0; r < ranks; ++r) ins.emplace_back(in[r], room), outs.emplace_back(out[r], room);
        const auto lengths = counts.inputs(), by_pair = pairs.inputs();
        const auto filled = [&] {
            counts.fill([&](std::size_t, std::size_t i) { return of[i]; });
            pairs.fill([&](std::size_t r, std::size_t i) { return 100 * (r + i); });  // as many there and back
            in.fill([](std::size_t r, std::size_t i) { return element(r, i); });
            out.fill([](std::size_t, std::size_t) { return -7.0F; });
        };
        auto& gangs = g.node.gangs();
        const gs::device_id d = g.devices[0];
        const gs::launch_options options{.blocks = 2, .threads = 128};
        filled();
        REQUIRE(gs::submit_shared_all_gatherv<float>(gangs, d, g.stream(), g.members, ins, outs, lengths, options) ==
                errc::none);
        CHECK(g.result() == errc::none);
        for (std::uint32_t r = 0; r < ranks; ++r)
            CHECK(out.off(r, [&](std::size_t i) {
                return i >= total ? -7.0F : i < 700 ? element(0, i) : element(2, i - 700);
            }) == 0);
        filled();
        REQUIRE(gs::submit_shared_reduce_scatterv<float>(gangs, d, g.stream(), g.members, ins, outs, lengths, gs::sum{},
                                                         options) == errc::none);
        CHECK(g.result() == errc::none);
        for (std::uint32_t r = 0; r < ranks; ++r)
            CHECK(out.off(r, [&](std::size_t i) { return i < of[r] ? sum_of(ranks, begins[r] + i) : -7.0F; }) == 0);
        filled();
        REQUIRE(gs::submit_shared_all_to_allv<float>(gangs, d, g.stream(), g.members, ins, outs, by_pair, by_pair,
                                                     options) == errc::none);
        CHECK(g.result() == errc::none);
        for (std::uint32_t r = 0; r < ranks; ++r)
            CHECK(out.off(r, [&](std::size_t i) {
                std::size_t at = 0;  // where the part of rank q begins here, and there
                for (std::uint32_t q = 0; q < ranks; at += 100 * (q + r), ++q)
                    if (i < at + 100 * (q + r)) return element(q, 100 * (q * r + r * (r - 1) / 2) + i - at);
                return -7.0F;
            }) == 0);
        pairs.fill([](std::size_t r, std::size_t i) { return std::uint64_t{r == 2 && i == 0 ? 7U : 1U}; });
        REQUIRE(gs::submit_shared_all_to_allv<float>(gangs, d, g.stream(), g.members, ins, outs, by_pair, by_pair,
                                                     options) == errc::none);
        CHECK(g.result() == errc::mismatch);
    });
}

TEST_CASE("workspaces in pinned memory", "[gpu][collective]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        rig g(3, gs::workspaces::on_host);
        rank_arrays<float> in(g.node, g.devices, odd_size), out(g.node, g.devices, odd_size);
        in.fill([](std::size_t r, std::size_t i) { return element(r, i); });
        for (const algorithm how : {algorithm::one_shot, algorithm::ring, algorithm::two_shot}) {
            g.group.set_tuning(gs::tuning_table::always(how));
            out.fill([](std::size_t, std::size_t) { return -7.0F; });
            REQUIRE(g.all_reduce(g.stream(), in, out, odd_size) == errc::none);
            REQUIRE(g.result() == errc::none);
            for (std::uint32_t r = 0; r < 3; ++r) CHECK(out.off(r, [](std::size_t i) { return sum_of(3, i); }) == 0);
        }
        CHECK(gs::submit_shared_broadcast<float>(g.node.gangs(), g.devices[0], g.stream(), g.members, out.all(), 1,
                                                 0) == errc::not_supported);
    });
}

TEST_CASE("collectives in graphs", "[gpu][collective]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        rig g(2);
        rank_arrays<float> x(g.node, g.devices, odd_size);
        const auto captured = cu::capture(g.stream(), [&](cu::stream& to) {
            for (int i = 0; i < 3; ++i) REQUIRE(g.all_reduce(to, x, x, odd_size) == errc::none);
        });
        rank_arrays<float> pieces(g.node, g.devices, odd_size / 2);
        const auto inputs = x.inputs(), brought = pieces.inputs();
        const auto others = cu::capture(g.stream(), [&](cu::stream& to) {
            REQUIRE(gs::submit_shared_reduce_scatter<float>(g.node.gangs(), g.devices[0], to, g.members, inputs,
                                                            pieces.all(), odd_size / 2) == errc::none);
            REQUIRE(gs::submit_shared_all_gather<float>(g.node.gangs(), g.devices[0], to, g.members, brought, x.all(),
                                                        odd_size / 2) == errc::none);
        });
        cu::graph_executable run{captured}, run_others{others};
        x.fill([](std::size_t, std::size_t i) { return element(0, i); });
        for (int round = 1; round <= 2; ++round) {
            run.launch(g.stream());
            REQUIRE(g.all_reduce(g.stream(), x, x, odd_size) == errc::none);
            REQUIRE(g.result() == errc::none);
        }
        for (std::uint32_t r = 0; r < 2; ++r) CHECK(x.off(r, [](std::size_t i) { return 256 * element(0, i); }) == 0);
        for (int round = 1; round <= 2; ++round) run_others.launch(g.stream());
        REQUIRE(g.result() == errc::none);
        for (std::uint32_t r = 0; r < 2; ++r)  // all but the last element, which is in no part
            CHECK(x.off(r, [](std::size_t i) { return (i + 1 < odd_size ? 1024 : 256) * element(0, i); }) == 0);
    });
}

TEST_CASE("a rank that is alone gives up at its deadline", "[gpu][collective][waits]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        rig g(2);
        const auto before = std::chrono::steady_clock::now();
        launch_alone(g, 50ms);
        CHECK(g.result() == errc::deadline_exceeded);
        if (!time_is_virtual) CHECK(std::chrono::steady_clock::now() - before >= 50ms);
        // The group is closed for good; the ranks go on in another one.
        CHECK(g.submit([](std::size_t) { return gs::detail::barrier_body{}; }, 1) == errc::none);
        CHECK(g.result() == errc::deadline_exceeded);
        const std::vector<std::uint32_t> all{0, 1};
        const auto next = g.group.subgroup(all);
        const std::vector<gs::member> members{next.rank(0), next.rank(1)};
        const std::vector<gs::detail::barrier_body> bodies(2);
        CHECK(gs::submit_shared(g.node.gangs(), g.devices[0], g.stream(), std::span<const gs::member>(members),
                                std::span<const gs::detail::barrier_body>(bodies)) == errc::none);
        CHECK(g.stream().record().wait(gs::never));
        CHECK_FALSE(gs::fault_of(members[0]));
    });
}

TEST_CASE("a rank that waits is aborted", "[gpu][collective][waits]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        rig g(2);
        std::jthread host([&] {
            std::this_thread::sleep_for(20ms);
            g.group.abort();
        });
        launch_alone(g, 20s);
        CHECK(g.result() == errc::aborted);
    });
}

TEST_CASE("an abort amid the rows of a fused all-reduce", "[gpu][collective][waits]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        // More than a MiB of each block: it looks up in between, and rows have barriers.
        constexpr std::size_t width = 4096, rows = 280, n = rows * width;
        rig g(2);
        rank_arrays<float> x(g.node, g.devices, n), weight(g.node, g.devices, width);
        rank_arrays<gs::bfloat16> out(g.node, g.devices, n);
        x.fill([](std::size_t r, std::size_t i) { return element(r, i); });
        weight.fill([](std::size_t, std::size_t) { return 1.0F; });
        const auto steps_of = [&](std::size_t r) {
            return gs::reduced(std::span<const float>(x[r], n), width) | gs::rms_norm(weight[r], 1e-6F) |
                   gs::cast<gs::bfloat16>();
        };
        const std::vector<decltype(steps_of(0))> steps{steps_of(0), steps_of(1)};
        REQUIRE(gs::submit_shared_run(g.node.gangs(), g.devices[0], g.stream(), g.members,
                                      std::span<const decltype(steps_of(0))>(steps), out.all(),
                                      {.blocks = 1, .threads = 128}) == errc::none);
        if (run_on != nullptr) run_on(4'000'000);  // of some twenty: in the first rows
        g.group.abort();
        const errc how = g.result();  // on a device it may be over by then
        CHECK((how == errc::aborted || (how == errc::none && !time_is_virtual)));
    });
}

TEST_CASE("collectives within a partition", "[gpu][collective]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        rig g(2);
        auto parts =
            cu::make_green_contexts(g.node, g.devices[0], gs::equal_sms(cu::query_sm_split(g.node, g.devices[0]), 2));
        rank_arrays<float> x(g.node, g.devices, odd_size);
        for (auto& part : parts) {
            auto inside = part.make_stream();
            x.fill([](std::size_t r, std::size_t i) { return element(r, i); });
            REQUIRE(g.all_reduce(inside, x, x, odd_size) == errc::none);
            CHECK(inside.record().wait(gs::never));
            CHECK(g.result() == errc::none);
            for (std::uint32_t r = 0; r < 2; ++r) CHECK(x.off(r, [](std::size_t i) { return sum_of(2, i); }) == 0);
        }
    });
}

TEST_CASE("collectives of ranks on several devices, or on the only one, a launch for each",
          "[gpu][collective][devices]") {
    using namespace collectives_suite;
    as_far_as_supported([] {
        const std::uint32_t devices = num_devices();
        if (devices < 2) WARN("not supported: one device, so one rank");
        std::vector<gs::device_id> all;
        for (std::uint32_t d = 0; d < devices && d < 8; ++d) all.push_back({d});
        bool peers = all.size() == 1;
        if (!peers) {
            cu::node node;
            peers = cu::connect(node, all);
        }
        if (!peers) WARN("not supported: the devices don't reach each other");
        for (const auto where : {gs::workspaces::on_host, gs::workspaces::on_devices}) {
            if (where == gs::workspaces::on_devices && !peers) continue;
            rig g(all, where);
            if (all.size() > 1) (void)cu::connect(g.node, all);
            rank_arrays<float> in(g.node, g.devices, odd_size), out(g.node, g.devices, odd_size);
            in.fill([](std::size_t r, std::size_t i) { return element(r, i); });
            const auto inputs = in.inputs();
            for (const algorithm how : {algorithm::one_shot, algorithm::two_shot, algorithm::ring}) {
                g.group.set_tuning(gs::tuning_table::always(how));
                REQUIRE(gs::submit_all_reduce<float>(g.node.gangs(), g.devices, std::span(g.streams), g.members, inputs,
                                                     out.all(), odd_size) == errc::none);
                REQUIRE(g.result() == errc::none);
                for (std::size_t r = 0; r < all.size(); ++r)
                    CHECK(out.off(r, [&](std::size_t i) { return sum_of(all.size(), i); }) == 0);
            }
            if (where == gs::workspaces::on_host) continue;
            REQUIRE(gs::submit_broadcast<float>(g.node.gangs(), g.devices, std::span(g.streams), g.members, in.all(),
                                                odd_size, 0) == errc::none);
            REQUIRE(g.result() == errc::none);
            for (std::size_t r = 0; r < all.size(); ++r)
                CHECK(in.off(r, [](std::size_t i) { return element(0, i); }) == 0);
        }
    });
}
