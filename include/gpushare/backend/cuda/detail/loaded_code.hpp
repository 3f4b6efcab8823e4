// SPDX-License-Identifier: Apache-2.0
// The code that the process has used: kernels and executable graphs. The driver loads code when it
// is first used, and may wait for all work of the context to do so. (Programming Guide, "Lazy
// Loading", "Concurrent Execution".) A part of the launch hub.
//
//   loaded_code seen;
//   const code_use use{function, nullptr, context};
//   if (!seen.has(use)) { ...the launch may wait...  seen.add(use); }
//   seen.clear();  // a module was unloaded: handles may be used again
//
// The table has a fixed size and takes no lock. A use may be in either of two rows. If both rows
// are full, the table forgets another use, which counts as a first use when it comes again. So a
// program with too much code has waits opened more often than needed, and never too rarely.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// One way in which a call uses code.
struct code_use {
    // a function, kernel, module, library or executable graph; null: nothing
    const void* what = nullptr;
    const char* name = nullptr;  // of a symbol in a module or library; null: none
    const void* context = nullptr;
    // Uses of one function in different ways are told apart: only the launch loads all that a
    // launch needs.
    enum class way : std::uint8_t { launch, record, look_up, change_graph } how = way::launch;
    bool graph = false;  // an executable graph

    /// Whether the call puts a function into a graph. The graph may load the function later.
    [[nodiscard]] bool records() const noexcept { return how == way::record; }
};

/// Safe from any thread.
class loaded_code {
public:
    [[nodiscard]] bool has(const code_use& use) const noexcept {
        const std::uint64_t key = key_of(use);
        return is_in(first_row(key), key) || is_in(second_row(key), key);
    }
    /// The use is over, and the driver has loaded what it needs.
    void add(const code_use& use) noexcept {
        const std::uint64_t key = key_of(use);
        if (has(use)) return;
        // relaxed: the driver orders its own loads, and a key tells of nothing else.
        if (fits(rows_[first_row(key)], key) || fits(rows_[second_row(key)], key)) return recorded(use);
        rows_[first_row(key)][next_.fetch_add(1, std::memory_order_relaxed) % in_row].store(key,
                                                                                            std::memory_order_relaxed);
        recorded(use);
    }
    /// The executable graph is new, although there was an earlier one with the same handle.
    void forget(const void* graph) noexcept {
        for (const auto how : {code_use::way::launch, code_use::way::change_graph}) {
            const std::uint64_t key = key_of({.what = graph, .how = how, .graph = true});
            for (const std::size_t place : {first_row(key), second_row(key)})
                for (auto& k : rows_[place]) {
                    std::uint64_t same = key;
                    (void)k.compare_exchange_strong(same, 0, std::memory_order_relaxed);
                }
        }
    }
    void clear() noexcept {
        for (auto& in : rows_)
            for (auto& k : in) k.store(0, std::memory_order_relaxed);
    }

private:
    static constexpr std::size_t in_row = 8, bits_of_row = 12;
    using row = std::array<std::atomic<std::uint64_t>, in_row>;

    [[nodiscard]] bool is_in(std::size_t place, std::uint64_t key) const noexcept {
        for (const auto& k : rows_[place])
            if (k.load(std::memory_order_relaxed) == key) return true;
        return false;
    }
    // Puts the key into a free place of the row, if there is one.
    [[nodiscard]] static bool fits(row& in, std::uint64_t key) noexcept {
        for (auto& k : in) {
            std::uint64_t none = 0;
            if (k.compare_exchange_strong(none, key, std::memory_order_relaxed)) return true;
        }
        return false;
    }
    // Once a function was recorded for the first time, each graph may have it: so each graph counts
    // as unused again.
    void recorded(const code_use& use) noexcept {
        if (use.records()) functions_in_graphs_.fetch_add(1, std::memory_order_relaxed);
    }
    [[nodiscard]] std::uint64_t key_of(const code_use& use) const noexcept {
        const std::string_view name = use.name != nullptr ? std::string_view(use.name) : std::string_view{};
        std::uint64_t of_name = 0;
        for (const char c : name) of_name = launches::key_of(of_name, static_cast<unsigned char>(c));
        const std::uint64_t turn = use.graph ? functions_in_graphs_.load(std::memory_order_relaxed) : 0;
        const void* const context = use.graph ? nullptr : use.context;
        return launches::key_of(launches::number(use.what), of_name, launches::number(context), turn, use.how) | 1;
    }
    // Two independent parts of a mixed key.
    [[nodiscard]] static std::uint64_t mixed(std::uint64_t key) noexcept {
        return key * gpushare::detail::golden_ratio;
    }
    [[nodiscard]] static std::size_t first_row(std::uint64_t key) noexcept {
        return static_cast<std::size_t>(mixed(key) >> (64 - bits_of_row));
    }
    [[nodiscard]] static std::size_t second_row(std::uint64_t key) noexcept {
        return static_cast<std::size_t>(mixed(key) >> (64 - 2 * bits_of_row)) & ((1U << bits_of_row) - 1);
    }

    std::array<row, std::size_t{1} << bits_of_row> rows_{};
    std::atomic<std::uint64_t> functions_in_graphs_{0};
    std::atomic<std::size_t> next_{0};
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
