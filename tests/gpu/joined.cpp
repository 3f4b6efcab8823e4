// SPDX-License-Identifier: Apache-2.0
#include "gpu/joined.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/numbers.hpp>

#include "gpu/job_rig.hpp"

namespace jobs {

namespace gs = gpushare;

namespace {

/// An array on a device, between elements that nobody may write.
template <class T>
class array_between {
public:
    explicit array_between(std::vector<T> of_host, std::size_t first, std::size_t count)
        : expected(std::move(of_host)), first_(first), count_(count) {
        data_ = static_cast<T*>(memory().allocate(size(), 256));
        stream.copy(data_, expected.data(), size());
    }
    array_between(const array_between&) = delete;
    array_between& operator=(const array_between&) = delete;
    ~array_between() { (void)memory().deallocate(data_, size(), 256); }

    [[nodiscard]] T* data() const noexcept { return data_ + first_; }
    [[nodiscard]] std::size_t count() const noexcept { return count_; }
    /// Changes what is expected of each element.
    template <class F>
    void expect(const F& f) {
        for (std::size_t i = 0; i < count_; ++i) expected[first_ + i] = f(expected[first_ + i]);
    }
    [[nodiscard]] bool is_as_expected() {
        std::vector<T> got(expected.size());
        stream.copy(got.data(), data_, size());
        (void)stream.record().wait(gs::never);
        return std::memcmp(got.data(), expected.data(), size()) == 0;
    }

    gs::cuda::node node{};
    gs::cuda::stream stream = node.make_stream({0}, gs::priority{});
    std::vector<T> expected;

private:
    [[nodiscard]] gs::cuda::node::memory_type& memory() { return node.memory({0}); }
    [[nodiscard]] std::size_t size() const noexcept { return expected.size() * sizeof(T); }

    T* data_ = nullptr;
    std::size_t first_, count_;
};

/// Ordinary numbers, and where there are any the ends of the type's range, and beyond.
template <class T>
T any_number(std::mt19937_64& any) {
    if constexpr (std::integral<T>) {
        return static_cast<T>(any());
    } else {
        using wide = divided_in<T>;
        constexpr std::array special{
            wide{0},     -wide{0},   std::numeric_limits<wide>::denorm_min(), wide(6e-8), wide(1e-40),
            wide(65504), wide(3e38), std::numeric_limits<wide>::infinity()};
        if (any() % 8 == 0) return static_cast<T>(special[any() % special.size()]);
        return static_cast<T>((static_cast<wide>(any() % 20'001) - 10'000) / 997);
    }
}

/// Ends of warps, blocks of threads, grains and grids, and whatever else.
std::size_t any_count(std::mt19937_64& any) {
    constexpr std::array<std::size_t, 5> edges{64, 256, 512, 8192, 16384};
    if (any() % 3 == 0) return 1 + any() % 700;
    return edges[any() % (any() % 4 == 0 ? edges.size() : 3)] + any() % 3 - 1;
}

template <class T>
std::string trouble_of_type(const char* name, std::mt19937_64& any) {
    const std::size_t first = any() % 5, count = any_count(any);
    std::vector<T> x(first + count + 3);
    for (T& one : x) one = any_number<T>(any);
    std::string wrong;
    const auto check = [&](array_between<T>& a, const char* what) {
        if (!a.is_as_expected())
            wrong += std::string(what) + " of " + std::to_string(count) + " elements of type " + name + "\n";
    };
    if constexpr (!std::integral<T>) {
        array_between<T> a(x, first, count);
        const auto by = static_cast<divided_in<T>>(1 + any() % 9);
        divide_on_device(a.stream, a.data(), count, by);
        a.expect([by](T one) { return static_cast<T>(static_cast<divided_in<T>>(one) / by); });
        check(a, "other averages");
    }
    constexpr std::array operators{gs::horovod::Sum, gs::horovod::Min, gs::horovod::Max, gs::horovod::Product};
    const T neutral = gs::horovod::detail::neutral_of<T>(operators[any() % operators.size()]);
    array_between<T> a(std::move(x), first, count);
    fill_on_device(a.stream, a.data(), count, neutral);
    a.expect([neutral](T) { return neutral; });
    check(a, "another filling");
    return wrong;
}

}  // namespace

std::string trouble_of_joined(std::uint64_t seed) {
    return on_bounded_machine([seed] {
        std::mt19937_64 any(seed);
        return trouble_of_type<float>("float", any) + trouble_of_type<double>("double", any) +
               trouble_of_type<gs::float16>("float16", any) + trouble_of_type<gs::bfloat16>("bfloat16", any) +
               trouble_of_type<std::int64_t>("int64", any);
    });
}

std::vector<cost> costs_of_joined() {
    constexpr std::size_t few = 2048, many = 6144;
    const auto cost_of = [](std::string name, double least, const auto& work) {
        const auto of = [&](std::size_t count) {
            array_between<float> a(std::vector<float>(count, 1.0F), 0, count);
            work(a);
            (void)a.stream.record().wait(gs::never);
        };
        return cost_of_more(
            std::move(name), static_cast<double>(many - few), least, [&] { of(few); }, [&] { of(many); });
    };
    return {cost_of("fill", 4, [](auto& a) { fill_on_device(a.stream, a.data(), a.count(), 0.0F); }),
            cost_of("divide", 8, [](auto& a) { divide_on_device(a.stream, a.data(), a.count(), 3.0F); })};
}

}  // namespace jobs
