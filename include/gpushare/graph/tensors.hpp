// SPDX-License-Identifier: Apache-2.0
// Tensors in memory, as engines get them: where the bytes are, and room for those whose size is only known when they are
// there.
//
//   gpushare::graph::tensor picture{gpushare::graph::element::f32, {1, 3, 640, 640}, pixels, pixels_size};
//   gpushare::graph::tensor_blocks blocks(chat.memory(), g.values.size());      // charged to the tenant
//   gpushare::graph::tensor map{.room = &blocks, .number = 7};                  // wherever there is room, of any size
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/model_error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// Gives tensors room whose size nobody knew before.
class tensor_room {
public:
    /// At least `size` bytes for tensor `number`, at a multiple of 256, valid until the next call for that number. Called
    /// by engines, on the thread that computes, for one tensor at a time. Throws std::bad_alloc or what is derived from it.
    [[nodiscard]] virtual void* room_for(std::uint32_t number, std::size_t size) = 0;

protected:
    ~tensor_room() = default;
};

/// A tensor in memory that an engine can use. A plain value that owns nothing.
struct tensor {
    element type = element::unknown;    ///< of its elements
    std::vector<std::int64_t> shape{};  ///< outermost first; an extent below 0: the engine finds out
    void* data = nullptr;               ///< rows behind each other without gaps; null where it has no place yet
    std::size_t capacity = 0;           ///< bytes at `data`
    tensor_room* room = nullptr;        ///< gives an output a place that has none, or a too small one
    std::uint32_t number = 0;           ///< by which `room` knows the tensor

    /// Bytes that the shape asks for; 0 where an extent or the type is unknown. Saturates.
    [[nodiscard]] std::size_t size() const noexcept {
        bytes all{size_of(type)};
        for (const std::int64_t extent : shape) all = extent < 0 ? bytes{} : all * static_cast<std::uint64_t>(extent);
        return static_cast<std::size_t>(all.count());
    }
    /// Whether all extents are known.
    [[nodiscard]] bool shaped() const noexcept {
        for (const std::int64_t extent : shape)
            if (extent < 0) return false;
        return true;
    }
    /// Gives an output its type and shape, and a place for them. Throws model_error (engine) where there is none; what
    /// `room` throws.
    void* place(element of, std::vector<std::int64_t> extents) {
        type = of;
        shape = std::move(extents);
        const std::size_t needed = size();
        if (needed <= capacity && data != nullptr) return data;
        if (room == nullptr)
            throw model_error(
                model_fault::engine, {},
                "an output has " + std::to_string(needed) + " bytes, and its buffer " + std::to_string(capacity));
        data = room->room_for(number, needed);
        capacity = needed;
        return data;
    }
};

/// Blocks of a memory, one for each tensor that needs one; they grow and are kept. Neither copied nor moved; for one
/// thread at a time. `Memory` must outlive it, and no work may use the blocks when it goes.
template <memory_resource Memory>
class tensor_blocks final : public tensor_room {
public:
    static constexpr std::size_t alignment = 256;  ///< of each block, in bytes

    /// For tensors 0 to n - 1.
    tensor_blocks(Memory& of, std::size_t n) : memory_(&of), blocks_(n) {}
    tensor_blocks(const tensor_blocks&) = delete;
    tensor_blocks& operator=(const tensor_blocks&) = delete;
    ~tensor_blocks() {
        for (auto& b : blocks_) free(b);
    }

    [[nodiscard]] void* room_for(std::uint32_t number, std::size_t size) override {
        block& b = blocks_.at(number);
        if (b.data != nullptr && size <= b.size) return b.data;
        free(b);
        const std::size_t whole = size == 0 ? 1 : size;
        b.data = memory_->allocate(whole, alignment);
        b.size = whole;
        return b.data;
    }
    /// Gives back one tensor's block.
    void release(std::uint32_t number) noexcept { free(blocks_[number]); }
    /// Bytes of all blocks that are there.
    [[nodiscard]] bytes size() const noexcept {
        bytes all{};
        for (const auto& b : blocks_) all += bytes{b.size};
        return all;
    }

private:
    struct block {
        void* data = nullptr;
        std::size_t size = 0;
    };
    void free(block& b) noexcept {
        if (b.data != nullptr) memory_->deallocate(b.data, b.size, alignment);
        b = {};
    }

    Memory* memory_;
    std::vector<block> blocks_;
};

/// Runs pieces of models. `enqueue(stream, piece, inputs, outputs)` enqueues piece number `piece`, whose inputs and
/// outputs come in the order of edges_of(). When the work runs, it reads the inputs' shapes and bytes, and gives each
/// output its type and shape by place(), or finds them there: an output that is shaped and has a place is written where
/// it is. The spans and the tensors stay until the work has ended, and are for this work alone meanwhile. An input
/// without a place is one whose piece failed: the work must fail as well. Failures are thrown, on either side.
template <class E, class Stream>
concept piece_engine = timeline<Stream> &&
    requires(E& e, Stream& to, std::uint32_t piece, std::span<const tensor* const> inputs,
             std::span<tensor* const> outputs) {
    e.enqueue(to, piece, inputs, outputs);
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
