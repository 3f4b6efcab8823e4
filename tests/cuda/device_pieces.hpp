// SPDX-License-Identifier: Apache-2.0
// A tenant of a CUDA node, and its floats, for tests of engines that compute pieces on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "graph/piece_programs.hpp"

namespace support {

using namespace gpushare::literals;
using cuda_tenancy = gpushare::tenancy<gpushare::cuda::node>;

struct piece_tenant {
    gpushare::cuda::node node;
    cuda_tenancy shared{node};
    cuda_tenancy::tenant chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct});

    [[nodiscard]] bool all_back() {
        chat.memory().collect();
        return chat.memory().free() == chat.memory().capacity();
    }
    template <class Work>
    void submit(Work work) {
        auto ticket = chat.submit(work);
        (void)ticket.wait();
        if (ticket.status() != gpushare::errc::none) ticket.rethrow();
    }
};

/// Floats in the tenant's memory, `offset` bytes behind the begin of a block.
class device_floats {
public:
    device_floats(cuda_tenancy::tenant& of, const extents& shape, std::size_t offset = 0)
        : whose_(&of), size_(count(shape) * sizeof(float) + offset + 1) {
        block_ = static_cast<std::byte*>(of.memory().allocate(size_, 256));
        at = {gpushare::graph::element::f32, shape, block_ + offset, size_ - offset};
        std::memset(block_, 0xff, size_);  // NaN
    }
    /// `n` has a shape, and its numbers.
    template <class Numbers>
    device_floats(cuda_tenancy::tenant& of, const Numbers& n, std::size_t offset = 0)
        : device_floats(of, n.shape, offset) {
        for (std::size_t i = 0; i < n.at.size(); ++i) static_cast<float*>(at.data)[i] = static_cast<float>(n.at[i]);
    }
    device_floats(const device_floats&) = delete;
    device_floats& operator=(const device_floats&) = delete;
    ~device_floats() { whose_->memory().deallocate(block_, size_, 256); }

    gpushare::graph::tensor at;

private:
    cuda_tenancy::tenant* whose_;
    std::size_t size_;
    std::byte* block_ = nullptr;
};

/// Runs a piece on these inputs, `offset` bytes behind the begin of a block each; whether
/// right(output, wanted) is true of all outputs. Throws what the engine throws.
template <class Engine, class Values, class Right>
bool gives(piece_tenant& f, Engine& engine, std::uint32_t number, const gpushare::graph::detail::piece_program& p,
           const Values& inputs, const Values& want, std::size_t offset, const Right& right) {
    std::vector<std::unique_ptr<device_floats>> memory;
    std::vector<const gpushare::graph::tensor*> in;
    std::vector<gpushare::graph::tensor*> out;
    for (const auto v : p.inputs) {
        memory.push_back(std::make_unique<device_floats>(f.chat, inputs.at(v), offset));
        in.push_back(&memory.back()->at);
    }
    for (const auto v : p.outputs) {
        memory.push_back(std::make_unique<device_floats>(f.chat, want.at(v).shape, offset));
        memory.back()->at.type = gpushare::graph::element::unknown;
        out.push_back(&memory.back()->at);
    }
    std::exception_ptr refused;  // a submission wraps what its work throws
    f.submit([&](gpushare::cuda::stream& to) {
        try {
            engine.enqueue(to, number, in, out);
        } catch (...) {
            refused = std::current_exception();
        }
    });
    if (refused) std::rethrow_exception(refused);
    for (std::size_t i = 0; i < out.size(); ++i)
        if (!right(*out[i], want.at(p.outputs[i]))) return false;
    return true;
}

/// Inputs of any numbers, of `rows` rows where the program leaves that open.
template <class Values>
Values inputs_of(const gpushare::graph::detail::piece_program& p, std::int64_t rows, random& any) {
    Values all;
    for (const auto v : p.inputs) {
        auto& t = all[v];
        t.shape = p.values[v].shape;
        for (auto& e : t.shape) e = e < 0 ? rows : e;
        for (std::size_t i = 0; i < count(t.shape); ++i) t.at.push_back(number(any));
    }
    return all;
}

/// Computes each node literally by `Evaluate`, which makes all values of those of the inputs.
template <auto Evaluate>
struct literal_engine {
    using program = gpushare::graph::detail::piece_program;
    using tensor = gpushare::graph::tensor;
    struct kernel {
        const program* p;
        std::span<const tensor* const> in;
        std::span<tensor* const> out;
        template <class C>
        void operator()(C&) const {
            decltype(Evaluate(*p, {})) known;
            for (std::size_t i = 0; i < in.size(); ++i) {
                const auto* const from = static_cast<const float*>(in[i]->data);
                known[p->inputs[i]] = {in[i]->shape, {from, from + in[i]->size() / sizeof(float)}};
            }
            known = Evaluate(*p, std::move(known));
            for (std::size_t i = 0; i < out.size(); ++i) {
                const auto& made = known.at(p->outputs[i]);
                auto* const to = static_cast<float*>(out[i]->place(gpushare::graph::element::f32, made.shape));
                for (std::size_t k = 0; k < made.at.size(); ++k) to[k] = static_cast<float>(made.at[k]);
            }
        }
    };
    std::uint32_t add(const program& p) {
        pieces.push_back(std::make_unique<program>(p));
        return static_cast<std::uint32_t>(pieces.size() - 1);
    }
    void remove_last() { pieces.pop_back(); }
    void enqueue(gpushare::cuda::stream& to, std::uint32_t n, std::span<const tensor* const> in,
                 std::span<tensor* const> out) {
        to.launch({.blocks = 1}, kernel{pieces[n].get(), in, out});
    }
    std::vector<std::unique_ptr<program>> pieces{};
};

}  // namespace support
