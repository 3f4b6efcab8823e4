// SPDX-License-Identifier: Apache-2.0
// Element-wise chains and norms of models, compiled by nvcc, on the executor: the bits that their
// nodes give on the host, no race, and the cost of an element.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>

#include "gpu/chains.hpp"
#include "graph/chain_programs.hpp"
#include "standins/cuda/session.hpp"
#include "standins/ptx/runtime.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace {

namespace gs = gpushare;
using namespace gs::literals;
using gs::graph::element;
using gs::graph::tensor;
using gs::graph::detail::piece_program;
using support::float_tensor;
using support::float_values;

/// A tenant of a device, and an engine with pieces of it.
class rig {
public:
    rig() = default;
    rig(const rig&) = delete;
    rig& operator=(const rig&) = delete;
    ~rig() { chat_.memory().deallocate(memory_, room, 256); }

    /// What a piece makes of these, which lie a little behind multiples of 256 bytes.
    [[nodiscard]] float_values made(const piece_program& p, const float_values& inputs, std::size_t offset = 0) {
        const std::uint32_t piece = engine_.add(p);
        std::vector<tensor> tensors;
        std::size_t at = 0;
        const auto place = [&](const support::extents& shape) {
            const std::size_t size = support::count(shape) * sizeof(float);
            tensors.push_back({element::f32, shape, memory_ + at + offset * sizeof(float), size});
            at += (size + offset * sizeof(float) + 255) / 256 * 256;
            REQUIRE(at <= room);
        };
        const auto want = support::evaluate_floats(gs::graph::detail::with_norms(p), inputs);
        for (const auto v : p.inputs) place(inputs.at(v).shape);
        for (const auto v : p.outputs) place(want.at(v).shape);
        std::vector<const tensor*> in;
        std::vector<tensor*> out;
        for (std::size_t i = 0; i < tensors.size(); ++i)
            i < p.inputs.size() ? in.push_back(&tensors[i]) : out.push_back(&tensors[i]);
        float_values all;
        std::exception_ptr refused;
        submit([&](gs::cuda::stream& to) {
            for (std::size_t i = 0; i < in.size(); ++i) {
                const auto& x = inputs.at(p.inputs[i]).at;
                to.copy(in[i]->data, x.data(), x.size() * sizeof(float));
            }
            try {
                chains::enqueue(engine_, to, piece, in, out);
            } catch (...) {  // a submission wraps what its work throws
                refused = std::current_exception();
                return;
            }
            for (std::size_t i = 0; i < out.size(); ++i) {
                auto& y = all[p.outputs[i]];
                y.shape = out[i]->shape;
                y.at.resize(support::count(y.shape));
                to.copy(y.at.data(), out[i]->data, y.at.size() * sizeof(float));
            }
        });
        engine_.remove_last();
        if (refused) std::rethrow_exception(refused);
        return all;
    }

private:
    static constexpr std::size_t room = std::size_t{1} << 20;

    template <class Work>
    void submit(Work work) {
        auto ticket = chat_.submit(work);
        (void)ticket.wait();
        if (ticket.status() != gs::errc::none) ticket.rethrow();
    }

    gs::cuda::node node_{};
    chains::tenancy shared_{node_};
    chains::tenancy::tenant chat_ = shared_.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct});
    chains::engine engine_{chat_, [](std::string_view) { return piece_program{}; }};
    std::byte* memory_ = static_cast<std::byte*>(chat_.memory().allocate(room, 256));
};

bool same(const float_values& got, const float_values& want) {
    for (const auto& [v, t] : got)
        if (t.shape != want.at(v).shape || !std::ranges::equal(t.at, want.at(v).at, support::same_number)) return false;
    return !got.empty();
}

}  // namespace

TEST_CASE("random chains and norms are the host's bits as compiled", "[compiled]") {
    constexpr std::array orders{ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial};
    std::uint64_t taken = 0;
    const std::uint64_t rounds = support::few(90);
    for (std::uint64_t n = 0; n < rounds; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const support::random_chain made(any);
        const auto& p = made.b.p;
        const auto inputs = made.inputs();
        ptx::runtime::options().seed = seed;
        ptx::runtime::options().who = orders[n % orders.size()];
        ptx::runtime::options().most_instructions = 200'000'000;
        const standin::session gpu{{.devices = 1}};
        rig r;
        try {
            const auto got = r.made(p, inputs, any.below(4));
            CHECK(same(got, support::evaluate_floats(p, inputs)));
            ++taken;
        } catch (const gs::graph::model_error& e) {
            CHECK(std::ranges::find(p.nodes, e.node(), &gs::graph::detail::program_node::name) != p.nodes.end());
        }
    }
    CHECK(taken > rounds / 5);
}

TEST_CASE("a norm that a model spells out has the host's bits as compiled", "[compiled]") {
    constexpr std::array<std::int64_t, 4> widths{1, 31, 128, 301};
    const std::uint64_t rounds = support::few(24);
    for (std::uint64_t n = 0; n < rounds; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const auto width = any.of(widths);
        support::program_builder b;
        const auto x = b.input("x", {3, width}), scale = b.input("scale", {width});
        const support::spelt_norm norm(b, any, x, 2, any.one_in(2));
        b.output(b.node("Mul", {norm.made, scale}));
        float_values inputs{{x, {{3, width}, {}}}, {scale, {{width}, {}}}};
        for (auto& [v, t] : inputs)
            for (std::size_t i = 0; i < support::count(t.shape); ++i) t.at.push_back(4 * support::number(any));
        const standin::session gpu{{.devices = 1}};
        rig r;
        CHECK(same(r.made(b.p, inputs), support::evaluate_floats(gs::graph::detail::with_norms(b.p), inputs)));
    }
}

namespace {

/// Instructions, and bytes of global memory, read and written, for each element of a result.
struct cost {
    double instructions = 0, bytes = 0;
};
template <class Build>
cost cost_of(std::int64_t width, const Build& build) {
    const auto work_of = [&](std::int64_t rows) {
        support::random any(1);
        support::program_builder b;
        float_values inputs;
        build(b, support::extents{rows, width}, any);
        for (const auto v : b.p.inputs) {
            inputs[v].shape = b.p.values[v].shape;
            inputs[v].at.assign(support::count(inputs[v].shape), 0.5F);
        }
        const standin::session gpu{{.devices = 1}};
        rig r;
        const auto before = ptx::runtime::total().work;
        const auto got = r.made(b.p, inputs);
        CHECK(same(got, support::evaluate_floats(b.p, inputs)));
        const auto after = ptx::runtime::total().work;
        return std::pair(static_cast<double>(after.instructions - before.instructions),
                         static_cast<double>(after.loaded + after.stored - before.loaded - before.stored));
    };
    const auto [little, few] = work_of(8);
    const auto [much, many] = work_of(24);
    const auto elements = static_cast<double>(16 * width);
    return {(much - little) / elements, (many - few) / elements};
}

}  // namespace

TEST_CASE("a chain reads each array once, and a norm once a pass, as compiled", "[compiled]") {
    const auto gelu_of_sum = [](support::program_builder& b, const support::extents& shape, support::random& any) {
        const auto sum = b.node("Add", {b.input("x", shape), b.input("r", shape)});
        const auto biased = b.node("Add", {sum, b.constant("bias", {shape.back()}, any)});
        b.output(b.node("Gelu", {biased}, {support::text("approximate", "tanh")}));
    };
    const auto norm_of_sum = [](support::program_builder& b, const support::extents& shape, support::random& any) {
        const auto sum = b.node("Add", {b.input("x", shape), b.input("r", shape)});
        b.output(b.node("LayerNormalization",
                        {sum, b.constant("scale", {shape.back()}, any), b.constant("shift", {shape.back()}, any)}));
    };
    const auto softmax = [](support::program_builder& b, const support::extents& shape, support::random&) {
        b.output(b.node("Softmax", {b.input("x", shape)}, {support::integer("axis", -1)}));
    };
    const cost chain = cost_of(128, gelu_of_sum), norm = cost_of(128, norm_of_sum),
               long_norm = cost_of(512, norm_of_sum), row = cost_of(128, softmax);
    for (const auto& [name, c] : {std::pair("gelu(x + r + bias)", chain), std::pair("norm(x + r), 128 columns", norm),
                                  std::pair("norm(x + r), 512 columns", long_norm), std::pair("softmax", row)})
        WARN(name << ": " << c.instructions << " instructions and " << c.bytes << " bytes an element");
    CHECK(chain.bytes == 4 * 4);      // x, r and bias; the result
    CHECK(norm.bytes == 5 * 4);       // x, r, scale and shift; a row stays in registers
    CHECK(long_norm.bytes == 9 * 4);  // x and r three times
    CHECK(row.bytes == 2 * 4);
}

TEST_CASE("every instruction of the chains' kernel is known", "[compiled]") {
    CHECK(ptx::runtime::unknown_in(ptx_files) == std::set<std::string>{});
}
