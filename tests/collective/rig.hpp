// SPDX-License-Identifier: Apache-2.0
// Contexts in which the tests run collective bodies, besides the library's own contexts.
//
//   run_blocks<collective_test::delaying_context>(group, blocks, [&](auto& t) { return body(t, blocks); });
#pragma once

#include <barrier>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/concepts.hpp>

#include "support/random.hpp"
#include "support/threads.hpp"

namespace collective_test {

/// Loses its core at random moments, so that ranks meet in every order.
class delaying_context {
public:
    explicit delaying_context(std::uint64_t seed) : any_(seed) {}
    [[nodiscard]] static constexpr std::uint32_t block_rank() noexcept { return 0; }
    [[nodiscard]] static constexpr std::uint32_t num_blocks() noexcept { return 1; }
    [[nodiscard]] static constexpr std::uint32_t thread_rank() noexcept { return 0; }
    [[nodiscard]] static constexpr std::uint32_t num_threads() noexcept { return 1; }
    void sync() noexcept {
        if (any_.one_in(4)) std::this_thread::yield();
        if (any_.one_in(64)) std::this_thread::sleep_for(std::chrono::microseconds(any_.below(40)));
    }
    template <class T, class Op>
    T reduce(T x, Op) noexcept {
        sync();
        return x;
    }
    template <class T>
    T reduce_add(T x) noexcept {
        sync();
        return x;
    }
    void backoff(std::uint32_t) noexcept { std::this_thread::yield(); }
    [[nodiscard]] std::int64_t now() const noexcept { return gpushare::detail::thread_context::now(); }

private:
    support::random any_;
};
static_assert(gpushare::kernel_context<delaying_context>);

/// What the threads of one block share.
struct block {
    explicit block(std::uint32_t threads) : gate(threads), words(threads) {}
    std::barrier<> gate;
    std::vector<std::uint64_t> words;
};

/// A block of several threads, as on a device.
class block_context {
public:
    block_context(block& b, std::uint32_t thread) : block_(&b), thread_(thread) {}
    [[nodiscard]] std::uint32_t block_rank() const noexcept { return 0; }
    [[nodiscard]] std::uint32_t num_blocks() const noexcept { return 1; }
    [[nodiscard]] std::uint32_t thread_rank() const noexcept { return thread_; }
    [[nodiscard]] std::uint32_t num_threads() const noexcept {
        return static_cast<std::uint32_t>(block_->words.size());
    }
    void sync() noexcept { block_->gate.arrive_and_wait(); }
    template <class T, class Op>
    T reduce(T x, Op op) noexcept {
        static_assert(sizeof(T) <= 8);
        std::uint64_t word = 0;
        __builtin_memcpy(&word, &x, sizeof x);
        block_->words[thread_] = word;
        sync();
        T all{};
        for (std::uint32_t i = 0; i < num_threads(); ++i) {
            T y;
            __builtin_memcpy(&y, &block_->words[i], sizeof y);
            all = i == 0 ? y : op(all, y);
        }
        sync();
        return all;
    }
    template <class T>
    T reduce_add(T x) noexcept {
        return reduce(x, [](T a, T b) { return a + b; });
    }
    void backoff(std::uint32_t) noexcept { std::this_thread::yield(); }
    [[nodiscard]] std::int64_t now() const noexcept { return gpushare::detail::thread_context::now(); }

private:
    block* block_;
    std::uint32_t thread_;
};
static_assert(gpushare::kernel_context<block_context>);

/// Calls body(team) for every rank and block at once, in a delaying context each; which of them
/// comes first is shuffled. Returns one fault, if there is any.
template <class Body>
gpushare::collective_fault run_delayed(const gpushare::communicator& group, std::uint32_t blocks, std::uint64_t seed,
                                       gpushare::collective_kind kind, const Body& body) {
    std::vector<gpushare::collective_fault> faults(group.size() * blocks);
    std::vector<unsigned> order(faults.size());
    std::iota(order.begin(), order.end(), 0U);
    support::random any(seed);
    for (std::size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[any.below(k)]);
    support::together(group.size() * blocks, [&](unsigned k) {
        const unsigned i = order[k];
        delaying_context ctx(seed + i);
        for (unsigned before = 0; before < k; ++before) ctx.sync();
        gpushare::detail::session<delaying_context> t(ctx, group.rank(i / blocks).view(), i / blocks, i % blocks, kind,
                                                      gpushare::never.time_since_epoch().count());
        faults[i] = t.enter() ? body(t) : t.fault();
    });
    for (const auto& f : faults)
        if (f) return f;
    return {};
}

/// The same for blocks of `threads` threads, one block a rank.
template <class Body>
gpushare::collective_fault run_blocks(const gpushare::communicator& group, std::uint32_t threads,
                                      gpushare::collective_kind kind, const Body& body) {
    std::vector<std::unique_ptr<block>> blocks;
    for (std::uint32_t r = 0; r < group.size(); ++r) blocks.push_back(std::make_unique<block>(threads));
    std::vector<gpushare::collective_fault> faults(group.size() * threads);
    support::together(group.size() * threads, [&](unsigned i) {
        block_context ctx(*blocks[i / threads], i % threads);
        gpushare::detail::session<block_context> t(ctx, group.rank(i / threads).view(), i / threads, 0, kind,
                                                   gpushare::never.time_since_epoch().count());
        faults[i] = t.enter() ? body(t) : t.fault();
    });
    for (const auto& f : faults)
        if (f) return f;
    return {};
}

}  // namespace collective_test
