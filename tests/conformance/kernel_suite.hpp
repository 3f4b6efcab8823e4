// SPDX-License-Identifier: Apache-2.0
// The contract of kernels on every backend that runs blocks at the same time: ranks that
// communicate, barriers, reductions, 16-byte moves, number types. A backend has what the launcher
// suite needs; `threads` is the number of threads that a block can have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <gpushare/concepts.hpp>
#include "conformance/kernels.hpp"
#include "support/catch.hpp"
#include "support/number_inputs.hpp"

namespace conformance {

/// An array on the backend's device.
template <class T, class Backend>
class device_array {
public:
    device_array(Backend& backend, std::size_t count)
        : backend_(backend), data_(static_cast<T*>(backend.memory().allocate(count * sizeof(T), 256))), count_(count) {}
    device_array(const device_array&) = delete;
    device_array& operator=(const device_array&) = delete;
    ~device_array() { backend_.memory().deallocate(data_, count_ * sizeof(T), 256); }

    [[nodiscard]] T* data() const { return data_; }
    void set(typename Backend::stream& s, const std::vector<T>& values) {
        s.copy(data_, values.data(), values.size() * sizeof(T));
        CHECK(s.record().wait(gpushare::never));
    }
    [[nodiscard]] std::vector<T> get(typename Backend::stream& s) const {
        std::vector<T> values(count_);
        s.copy(values.data(), data_, count_ * sizeof(T));
        CHECK(s.record().wait(gpushare::never));
        return values;
    }

private:
    Backend& backend_;
    T* data_;
    std::size_t count_;
};

template <class Kernel, class Backend>
void check_talk(Backend& backend, typename Backend::stream& s, std::uint32_t threads) {
    using gpushare::errc;
    const std::uint32_t ranks =
        std::min(8U, s.max_cooperative_blocks(Kernel{nullptr, nullptr, nullptr, nullptr, 0, 0}, threads));
    REQUIRE(ranks >= 2);
    constexpr std::uint32_t count = 1000;
    device_array<std::uint32_t, Backend> flags(backend, ranks), words(backend, ranks * count),
        sums(backend, ranks * count), missed(backend, ranks);
    // The second launch is the one where the counter of epochs wraps around.
    const std::uint32_t first = ~0U;
    flags.set(s, std::vector<std::uint32_t>(ranks, first - 1));
    for (const std::uint32_t epoch : {first, first + 1, first + 2}) {
        const Kernel talk{flags.data(), words.data(), sums.data(), missed.data(), count, epoch};
        REQUIRE(s.launch_cooperative({.blocks = ranks, .threads = threads}, talk) == errc::none);
        std::vector<std::uint32_t> expected;
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::uint32_t i = 0; i < count; ++i) {
                std::uint32_t sum = 0;
                for (std::uint32_t other = 0; other < ranks; ++other) sum += talk.word(other, i);
                expected.push_back(sum);
            }
        CHECK(missed.get(s) == std::vector<std::uint32_t>(ranks, 0));
        CHECK(sums.get(s) == expected);
    }
}

template <class T, class Backend>
void check_packed(Backend& backend, typename Backend::stream& s, std::uint32_t threads) {
    constexpr std::uint32_t room = 1000;
    std::vector<std::uint8_t> bytes(room * sizeof(T));
    std::iota(bytes.begin(), bytes.end(), std::uint8_t{1});
    device_array<std::uint8_t, Backend> from(backend, bytes.size()), to(backend, bytes.size());
    from.set(s, bytes);
    // Every alignment of both ends, with and without a rest.
    for (std::uint32_t begin = 0; begin < gpushare::packed<T>::width; ++begin)
        for (std::uint32_t shift = 0; shift < 2; ++shift)
            for (const std::uint32_t count : {0U, 1U, 15U, 64U, 500U, 777U}) {
                to.set(s, std::vector<std::uint8_t>(bytes.size(), 0));
                const auto target = begin + shift;
                s.launch({.threads = threads},
                         kernels::copy_packed<T>{reinterpret_cast<T*>(to.data()) + target,
                                                 reinterpret_cast<const T*>(from.data()) + begin, count});
                std::vector<std::uint8_t> expected(bytes.size(), 0);
                std::copy_n(bytes.begin() + begin * std::ptrdiff_t{sizeof(T)}, count * sizeof(T),
                            expected.begin() + target * std::ptrdiff_t{sizeof(T)});
                CHECK(to.get(s) == expected);
            }
}

/// Devices have instructions of their own for these conversions.
template <class Number, class Backend>
void check_rounding(Backend& backend, typename Backend::stream& s, std::uint32_t threads) {
    std::vector<float> in;
    support::for_each_decisive_float<Number>([&](float f) { in.push_back(f); });
    for (std::uint32_t bit = 0; bit < 23; ++bit)
        for (const std::uint32_t head : {0x7f80'0000U, 0xff80'0000U})
            in.push_back(__builtin_bit_cast(float, head | 1U << bit));
    const auto count = static_cast<std::uint32_t>(in.size());
    device_array<float, Backend> from(backend, count), back(backend, count);
    device_array<Number, Backend> to(backend, count);
    from.set(s, in);
    s.launch({.threads = threads}, kernels::round_floats<Number>{from.data(), to.data(), back.data(), count});
    const auto out = to.get(s);
    const auto again = back.get(s);
    std::uint32_t wrong = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
        const Number expected{in[i]};
        const auto bits = __builtin_bit_cast(std::uint32_t, static_cast<float>(expected));
        if (out[i].bits() != expected.bits() || __builtin_bit_cast(std::uint32_t, again[i]) != bits) ++wrong;
    }
    CHECK(wrong == 0);
}

template <class Backend>
requires gpushare::launcher<typename Backend::stream>
void check_kernels(std::uint32_t threads) {
    using namespace gpushare;
    Backend backend;
    auto s = backend.make_stream(priority{0});

    SECTION("ranks that talk by system-scope flags") { check_talk<kernels::talk_across_ranks>(backend, s, threads); }
    SECTION("blocks that talk by device-scope flags") { check_talk<kernels::talk_on_device>(backend, s, threads); }
    SECTION("blocks of a cooperative launch meet again and again") {
        const std::uint32_t blocks =
            std::min(16U, s.max_cooperative_blocks(kernels::meet{nullptr, nullptr, 0}, threads));
        device_array<std::uint32_t, Backend> counter(backend, 1), wrong(backend, blocks);
        counter.set(s, {0});
        wrong.set(s, std::vector<std::uint32_t>(blocks, 1));
        REQUIRE(s.launch_cooperative({.blocks = blocks, .threads = threads},
                                     kernels::meet{counter.data(), wrong.data(), 20}) == errc::none);
        CHECK(wrong.get(s) == std::vector<std::uint32_t>(blocks, 0));
    }
    SECTION("all threads of a block get its sum and its maximum") {
        constexpr std::uint32_t count = 4001;
        std::vector<std::uint32_t> words(count);
        for (std::uint32_t i = 0; i < count; ++i) words[i] = i * 2654435761U;
        device_array<std::uint32_t, Backend> in(backend, count);
        in.set(s, words);
        for (std::uint32_t n : {1U, 2U, 31U, 32U, 33U, 96U, 100U, threads}) {
            n = std::min(n, threads);
            device_array<std::uint64_t, Backend> sums(backend, 2 * n);
            device_array<std::uint32_t, Backend> maxima(backend, 2 * n);
            s.launch({.blocks = 2, .threads = n}, kernels::reduce_block{in.data(), sums.data(), maxima.data(), count});
            CHECK(sums.get(s) == std::vector(2 * n, std::accumulate(words.begin(), words.end(), std::uint64_t{0})));
            CHECK(maxima.get(s) == std::vector(2 * n, *std::max_element(words.begin(), words.end())));
        }
    }
    SECTION("16-byte moves are right at every alignment") {
        check_packed<std::uint8_t>(backend, s, threads);
        check_packed<bfloat16>(backend, s, threads);
        check_packed<float>(backend, s, threads);
    }
    SECTION("numbers round as on the host") {
        check_rounding<float16>(backend, s, threads);
        check_rounding<bfloat16>(backend, s, threads);
        check_rounding<fp8_e4m3>(backend, s, threads);
        check_rounding<fp8_e5m2>(backend, s, threads);
    }
}

}  // namespace conformance
