// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// OpenVINO's allocator: the interface that OpenVINO requires, and, if its headers and library are
// available, OpenVINO's own tensors in a tenant's memory.
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include <gpushare/interop/openvino.hpp>
#include <gpushare/interop/pmr.hpp>

#include "interop/two_tenants.hpp"

#ifdef GPUSHARE_OPENVINO
#include <openvino/op/add.hpp>
#include <openvino/op/multiply.hpp>
#include <openvino/op/parameter.hpp>
#include <openvino/openvino.hpp>
#endif

namespace openvino_test {
namespace {

using memory = two_tenants::memory;
using allocator = gpushare::openvino_allocator<memory>;

// As ov::Allocator asks for it, by its documentation of 2026.
template <class A>
concept allocator_of_openvino = std::is_copy_constructible_v<A> && !std::is_abstract_v<A> &&
                                requires(A & a, const A& other, void* p, std::size_t n) {
    { a.allocate(n, n) } -> std::same_as<void*>;
    { a.deallocate(p, n, n) }
    noexcept;
    { a.is_equal(other) } -> std::same_as<bool>;
};
static_assert(allocator_of_openvino<allocator>);
static_assert(!allocator_of_openvino<gpushare::pmr_adaptor<memory>>, "its deallocate may throw");

}  // namespace

TEST_CASE("OpenVINO's allocator takes from a tenant and gives back", "[interop]") {
    two_tenants tenants;
    allocator mine{tenants.chat.memory()}, same{tenants.chat.memory()}, other{tenants.batch.memory()};
    CHECK(mine.is_equal(same));
    CHECK_FALSE(mine.is_equal(other));
    const auto before = tenants.chat.usage().allocations;
    void* const p = mine.allocate(1000);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 64 == 0);
    void* const none = mine.allocate(0, 16);
    CHECK(none != nullptr);
    CHECK(tenants.chat.usage().allocations == before + 2);
    same.deallocate(p, 1000);
    same.deallocate(none, 0, 16);
    CHECK(tenants.chat.usage().frees == 2);
    CHECK_THROWS_AS(mine.allocate(std::size_t{1} << 40), std::bad_alloc);
}

#ifdef GPUSHARE_OPENVINO
static_assert(std::is_constructible_v<ov::Allocator, allocator>);

TEST_CASE("tensors of OpenVINO lie in a tenant's memory", "[interop]") {
    two_tenants tenants;
    allocator mine{tenants.chat.memory()};
    {
        ov::Tensor cache(ov::element::f32, {4, 1024}, mine);
        CHECK(tenants.chat.usage().allocations == 1);
        CHECK(tenants.chat.usage().total == gpushare::bytes{16384});
        for (std::size_t i = 0; i < cache.get_size(); ++i) cache.data<float>()[i] = 1;
        const ov::Tensor alias = cache;
        CHECK(alias.data() == cache.data());
        // Over its quota it is an exception of OpenVINO's.
        CHECK_THROWS(ov::Tensor(ov::element::f32, {1U << 20, 1U << 10}, mine));
    }
    CHECK(tenants.chat.usage().frees == 1);
    const ov::Allocator a = mine, b = mine, c = allocator{tenants.batch.memory()};
    CHECK(a == b);
    CHECK_FALSE(a == c);
}

TEST_CASE("calls of OpenVINO are submissions, in its own memory and in a tenant's", "[interop]") {
    const bool in_tenant = GENERATE(false, true);
    two_tenants tenants;
    auto& chat = tenants.chat;
    const ov::Shape shape{1000};
    const auto x = std::make_shared<ov::op::v0::Parameter>(ov::element::f32, shape);
    const auto y = std::make_shared<ov::op::v1::Add>(x, x);
    const auto z = std::make_shared<ov::op::v1::Multiply>(y, x);
    ov::Core core;
    auto compiled = core.compile_model(std::make_shared<ov::Model>(ov::OutputVector{z}, ov::ParameterVector{x}), "CPU",
                                       ov::inference_num_threads(1), ov::hint::inference_precision(ov::element::f32));
    {
        auto request = compiled.create_infer_request();
        if (in_tenant) {  // these lines, and those of a call, are in docs/recipes.md
            gpushare::openvino_allocator mine{chat.memory()};
            request.set_input_tensor(ov::Tensor(ov::element::f32, shape, mine));  // 1: its tensors, KV caches
            request.set_output_tensor(ov::Tensor(ov::element::f32, shape, mine));
        }
        ov::Tensor in = request.get_input_tensor();
        for (std::size_t i = 0; i < in.get_size(); ++i) in.data<float>()[i] = static_cast<float>(i);
        for (int call = 0; call < 3; ++call) {
            auto done = chat.submit([&](auto& stream) {  // 2: around the call
                stream.launch({.blocks = 1}, [&](auto&) { request.infer(); });
            });
            done.wait();
        }
        CHECK(request.get_output_tensor().data<float>()[30] == 1800);
        CHECK(chat.usage().completed == 3);
        CHECK(chat.usage().device_time > gpushare::ns{});
        CHECK(tenants.batch.usage().device_time == gpushare::ns{});
        CHECK(chat.usage().allocations == (in_tenant ? 2 : 0));
    }
    CHECK(chat.usage().frees == (in_tenant ? 2 : 0));
}
#endif

}  // namespace openvino_test
