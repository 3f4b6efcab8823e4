// SPDX-License-Identifier: Apache-2.0
// Memory that a transport may still touch after a failed call isn't freed.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/compressed_link.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/group_operators.hpp>
#include <gpushare/gradient/horovod_processes.hpp>
#include <gpushare/gradient/negotiation.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>
#include <gpushare/gradient/wire.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/leaks.hpp"

namespace lent_arrays_test {

namespace gs = gpushare;

constexpr gs::collective_fault in_use{gs::errc::deadline_exceeded, gs::collective_kind::all_gather, 0, 0, true};

TEST_CASE("lent arrays outlive a fault with buffers in use, and an exception, and nothing else",
          "[gradient][transport]") {
    const support::leaks_are_meant here;
    const auto inside = std::make_shared<int>(1);
    const auto lend = [&](const auto& call) {
        std::vector<std::shared_ptr<int>> some{inside}, more{inside};
        gs::detail::lent_arrays memory(some, more);
        return memory.to(call);
    };
    CHECK_FALSE(lend([] { return gs::collective_fault{}; }));
    CHECK(inside.use_count() == 1);
    CHECK(lend([] { return gs::collective_fault{gs::errc::aborted, gs::collective_kind::barrier, 0, 0}; }));
    CHECK(inside.use_count() == 1);
    CHECK(lend([] { return in_use; }).buffers_in_use);
    CHECK(inside.use_count() == 3);
    CHECK_THROWS_AS(lend([]() -> gs::collective_fault { throw 7; }), int);
    CHECK(inside.use_count() == 5);
}

/// Its `at`th collective fails, and keeps its arrays.
struct keeping_transport : gs::thread_transport {
    keeping_transport(const gs::member& me, int at, bool by_exception)
        : gs::thread_transport(me), left(at), throws(by_exception) {}
    template <class T>
    bool keeps(std::span<const T> in, std::span<T> out) {
        if (--left != 0) return false;
        kept = {std::as_writable_bytes(std::span(const_cast<T*>(in.data()), in.size())), std::as_writable_bytes(out)};
        if (throws) throw 7;
        return true;
    }
    template <class T, class Op>
    gs::collective_fault all_reduce(std::span<const T> in, std::span<T> out, const Op& op, gs::instant deadline) {
        return keeps(in, out) ? in_use : gs::thread_transport::all_reduce<T>(in, out, op, deadline);
    }
    template <class T, class Op>
    gs::collective_fault reduce_scatter(std::span<const T> in, std::span<T> out, const Op& op, gs::instant deadline) {
        return keeps(in, out) ? in_use : gs::thread_transport::reduce_scatter<T>(in, out, op, deadline);
    }
    template <class T>
    gs::collective_fault all_gather(std::span<const T> in, std::span<T> out, gs::instant deadline) {
        return keeps(in, out) ? in_use : gs::thread_transport::all_gather<T>(in, out, deadline);
    }
    template <class T>
    gs::collective_fault broadcast(std::span<T> data, std::uint32_t root, gs::instant deadline) {
        return keeps(std::span<const T>(data), data) ? in_use : gs::thread_transport::broadcast(data, root, deadline);
    }
    int left;
    bool throws;
    std::vector<std::span<std::byte>> kept;
};

/// Whether memory is on the stack, in a frame that a function of the frame at `here` had.
bool is_below(const void* memory, const void* here) {
    const auto end = reinterpret_cast<std::uintptr_t>(here), at = reinterpret_cast<std::uintptr_t>(memory);
    return at < end && end - at < 65536;
}

/// `f` makes as many calls of a transport.
template <class F>
void check_kept(int calls, const F& f) {
    const bool throws = GENERATE(false, true);
    for (int at = 1; at <= calls; ++at) {
        CAPTURE(at, throws);
        const support::leaks_are_meant here;
        const gs::communicator group(1);
        keeping_transport net(group.rank(0), at, throws);
        if (throws)
            CHECK_THROWS_AS(f(net), int);
        else
            CHECK(f(net).buffers_in_use);
        REQUIRE(net.kept.size() == 2);
        REQUIRE_FALSE(net.kept[1].empty());
        for (const auto& some : net.kept) REQUIRE_FALSE(is_below(some.data(), &at));
        for (const auto& some : net.kept) std::ranges::fill(some, std::byte{1});  // what AddressSanitizer would refuse
    }
}

/// The fault of the transport, from a constructor that throws it.
template <class Make>
gs::collective_fault made(const Make& make) {
    try {
        make();
    } catch (const gs::operation_error& e) {
        return e.code() == in_use.code ? in_use : gs::collective_fault{};
    }
    return {};
}

TEST_CASE("a function's own arrays outlive it where a transport may still touch them", "[gradient][transport]") {
    std::vector<float> x(600, 1.0F), y(600), weight(6, 1.0F), bias(6);
    const gs::batch_shape shape{.samples = 100, .channels = 6};
    gs::batch_statistics seen{std::vector<gs::channel_moments>(6), std::vector<float>(6)};
    SECTION("the largest elements") {
        check_kept(2, [&](auto& net) {
            gs::top_k_feedback mine(600, 100);
            return gs::all_reduce_top_k(net, mine, x);
        });
    }
    SECTION("batch normalisation") {
        check_kept(1, [&](auto& net) { return gs::sync_batch_norm(net, shape, x, {weight, bias}, 1e-5F, y, seen); });
    }
    SECTION("its backward pass") {
        check_kept(1, [&](auto& net) {
            return gs::sync_batch_norm_backward(net, shape, x, x, weight, seen, {y, weight, bias});
        });
    }
    SECTION("a softmax over sharded classes") {
        const std::vector<std::int64_t> labels(100, 3);
        std::vector<std::int64_t> own_labels = labels;
        float loss = 0;
        check_kept(5, [&](auto& net) {
            gs::partial_softmax layer(net, 100, 6);
            own_labels = labels;
            return layer.step(net, x, own_labels, std::span<const float>(y), loss, x);
        });
    }
    SECTION("which gradients are ready") {
        const auto gradients = GENERATE(100U, 5000U);
        check_kept(2, [&](auto& net) {
            gs::ready_bits mine(gradients);
            mine.raise_alarm();
            std::vector<std::uint32_t> next;
            std::optional<gs::stall> why;
            return gs::negotiate(net, mine, next, why);
        });
    }
    SECTION("an order") {
        check_kept(1, [&](auto& net) {
            gs::recorded_order order(2000);
            return gs::agree(net, order);
        });
    }
    SECTION("the longest time of a step") {
        check_kept(1, [&](auto& net) {
            gs::ns took{5};
            return gs::agree(net, took);
        });
    }
    SECTION("whether the shards of all ranks are finite") {
        check_kept(1, [&](auto& net) {
            gs::gradient_buckets<> buckets;
            buckets.add("x", x);
            (void)buckets.ready(0);
            const auto f = buckets.reduce_scatter(net);
            if (net.throws) throw 7;  // the step has caught that
            return f;
        });
    }
    SECTION("how many ranks each process has") {
        check_kept(4, [&](auto& net) {
            gs::communicator inner(1);
            return made([&] { (void)gs::split(inner, net); });
        });
    }
    SECTION("how processes compress") {
        check_kept(2, [&](auto& net) { return made([&] { const gs::top_k_link link(net, 4, 0.5); }); });
    }
    SECTION("the chunks of processes with a device") {
        gs::host::node node({.devices = 1, .sms = 2});
        auto copies = node.make_stream(gs::device_id{0});
        check_kept(3, [&](auto& net) {
            return made([&] {
                const gs::horovod::device_process one(node, copies, net, *std::pmr::new_delete_resource(),
                                                      {.chunk = gs::bytes{4096}});
            });
        });
    }
    SECTION("how many rows each process with a device has") {
        const auto kind = GENERATE(gs::collective_kind::all_gather, gs::collective_kind::all_to_all);
        check_kept(1, [&](auto& net) {
            const int at = std::exchange(net.left, 0);
            gs::host::node node({.devices = 1, .sms = 2});
            auto copies = node.make_stream(gs::device_id{0}), caller = node.make_stream(gs::device_id{0});
            gs::horovod::device_process one(node, copies, net, *std::pmr::new_delete_resource());
            net.left = at;
            const auto array = one.made_of({.name = "rows",
                                            .kind = kind,
                                            .type = gs::detail::type_id<float>(),
                                            .element = sizeof(float),
                                            .data = x.data(),
                                            .count = x.size(),
                                            .splits = {x.size()},
                                            .stream = &caller});
            const auto f = one.move({{&array, 1}, {}, array->what}, gs::never);
            if (net.throws) throw 7;  // the process has caught that
            return f;
        });
    }
    SECTION("an order of buckets") {
        check_kept(1, [&](auto& net) {
            gs::gradient_buckets<> buckets;
            for (int g = 0; g < 2000; ++g) buckets.add("g", {});
            return buckets.adopt_order(net);
        });
    }
}

}  // namespace lent_arrays_test
