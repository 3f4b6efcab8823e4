// SPDX-License-Identifier: Apache-2.0
#include "gpu/batch_norm.hpp"

#include <cmath>
#include <cstddef>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>

#include "gpu/job_rig.hpp"
#include "standins/cuda/standin.hpp"

namespace jobs {

namespace gs = gpushare;

namespace {

constexpr float epsilon = 1e-5F;

/// One rank's arrays on the device, and what the host brings to them.
struct batch_rank {
    gs::device_batch on_device{};
    std::vector<float> x{}, dy{};
};

/// Ranks that share a device, in one piece of its memory.
class batch_rig {
public:
    /// Of random shapes, or of so many samples on each rank.
    explicit batch_rig(std::uint64_t seed, std::size_t each = 0) : any_(seed) {
        const std::size_t channels = each != 0 ? 2 : 1 + any_() % 4, positions = each != 0 ? 4 : 1 + any_() % 9;
        at_ = memory_ = static_cast<std::byte*>(node_.memory({0}).allocate(room, 256));
        weight = numbers(channels);
        bias = numbers(channels);
        float* const weights = bring(weight);
        float* const biases = bring(bias);
        for (batch_rank& r : ranks) {
            const std::size_t samples = each != 0 ? each : any_() % 4 == 0 ? 0 : any_() % 60;
            gs::device_batch& b = r.on_device;
            b.shape = {samples, channels, positions};
            r.x = numbers(b.shape.elements());
            r.dy = numbers(b.shape.elements());
            b.x = bring(r.x);
            b.dy = bring(r.dy);
            b.y = make<float>(r.x.size());
            b.dx = make<float>(r.x.size());
            b.weight = weights;
            b.bias = biases;
            b.moments = make<gs::channel_moments>(channels);
            b.of_ranks = make<gs::channel_moments>(channels * (std::size(ranks) + 1));
            for (float** const p : {&b.inverse_deviation, &b.dweight, &b.dbias}) *p = make<float>(channels);
            b.sums = make<float>(2 * channels);
        }
    }
    batch_rig(const batch_rig&) = delete;
    batch_rig& operator=(const batch_rig&) = delete;
    ~batch_rig() { (void)node_.memory({0}).deallocate(memory_, room, 256); }

    [[nodiscard]] gs::errc run() {
        std::vector<gs::device_batch> batches;
        for (const batch_rank& r : ranks) batches.push_back(r.on_device);
        const auto gather = [&](auto ins, auto outs, std::size_t words) {
            for (std::uint64_t* const out : outs)
                for (std::size_t r = 0; r < ins.size(); ++r)
                    stream_.copy(out + r * words, ins[r], words * sizeof(std::uint64_t));
            return gs::errc::none;
        };
        const auto all_reduce = [&](auto ins, auto outs, std::size_t n, gs::sum) {
            std::vector<float> sums(n);
            for (const float* const in : ins) {
                const std::vector<float> one = taken(in, n);
                for (std::size_t i = 0; i < n; ++i) sums[i] += one[i];
            }
            for (float* const out : outs) stream_.copy(out, sums.data(), n * sizeof(float));
            (void)stream_.record().wait(gs::never);
            return gs::errc::none;
        };
        return batch_norm_on_device(stream_, batches, epsilon, gather, all_reduce);
    }
    template <class T>
    [[nodiscard]] std::vector<T> taken(const T* from, std::size_t n) {
        std::vector<T> to(n);
        stream_.copy(to.data(), from, n * sizeof(T));
        (void)stream_.record().wait(gs::never);
        return to;
    }

    batch_rank ranks[2];
    std::vector<float> weight{}, bias{};

private:
    static constexpr std::size_t room = std::size_t{1} << 18;

    [[nodiscard]] std::vector<float> numbers(std::size_t n) {
        std::vector<float> some(n);
        for (float& x : some) x = (static_cast<float>(any_() % 2001) - 1000) / 97;
        return some;
    }
    /// Filled with what no result is, so that a place that nobody writes is seen.
    template <class T>
    [[nodiscard]] T* make(std::size_t n) {
        T* const begin = reinterpret_cast<T*>(at_);
        const std::vector<std::byte> filling(n * sizeof(T), std::byte{0xa5});
        stream_.copy(begin, filling.data(), filling.size());
        (void)stream_.record().wait(gs::never);
        at_ += (n * sizeof(T) + 255) / 256 * 256;
        return begin;
    }
    [[nodiscard]] float* bring(const std::vector<float>& x) {
        float* const to = make<float>(x.size());
        stream_.copy(to, x.data(), x.size() * sizeof(float));
        (void)stream_.record().wait(gs::never);
        return to;
    }

    std::mt19937_64 any_;
    gs::cuda::node node_;
    gs::cuda::stream stream_ = node_.make_stream({0}, gs::priority{});
    std::byte *memory_ = nullptr, *at_ = nullptr;
};

/// Of a channel, by definition, in double.
struct channel_by_definition {
    double count = 0, mean = 0, m2 = 0, inverse = 0;
    double dbias[2]{}, dweight[2]{}, of_dy = 0, of_both = 0;
};
template <class F>
void each_of(const batch_rank& r, std::size_t c, const F& f) {
    const gs::batch_shape& s = r.on_device.shape;
    for (std::size_t n = 0; n < s.samples; ++n)
        for (std::size_t p = 0; p < s.positions; ++p) f(s.at(n, c) + p);
}
channel_by_definition defined(const batch_rig& g, std::size_t c) {
    channel_by_definition d;
    for (const batch_rank& r : g.ranks)
        each_of(r, c, [&](std::size_t i) { d.count += 1, d.mean += static_cast<double>(r.x[i]); });
    if (d.count == 0) return d;
    d.mean /= d.count;
    for (const batch_rank& r : g.ranks)
        each_of(r, c, [&](std::size_t i) { d.m2 += std::pow(static_cast<double>(r.x[i]) - d.mean, 2); });
    d.inverse = 1 / std::sqrt(d.m2 / d.count + static_cast<double>(epsilon));
    for (std::size_t k = 0; k < std::size(g.ranks); ++k) {
        const batch_rank& r = g.ranks[k];
        each_of(r, c, [&](std::size_t i) {
            d.dbias[k] += static_cast<double>(r.dy[i]);
            d.dweight[k] += static_cast<double>(r.dy[i]) * (static_cast<double>(r.x[i]) - d.mean) * d.inverse;
        });
        d.of_dy += d.dbias[k];
        d.of_both += d.dweight[k];
    }
    return d;
}

bool near(double got, double wanted, double size) { return std::abs(got - wanted) <= 1e-5 * (std::abs(wanted) + size); }

std::string channel_trouble(batch_rig& g, std::size_t k, std::size_t c) {
    const batch_rank& r = g.ranks[k];
    const gs::device_batch& b = r.on_device;
    const channel_by_definition d = defined(g, c);
    const std::size_t channels = b.shape.channels;
    const auto m = g.taken(b.moments, channels)[c];
    const auto one = [&](const float* from) { return static_cast<double>(g.taken(from, channels)[c]); };
    std::string wrong;
    if (static_cast<double>(m.count) != d.count || !near(m.mean, d.mean, 1) || !near(m.m2, d.m2, 1))
        wrong += "other moments\n";
    if (!near(one(b.inverse_deviation), d.inverse, 0)) wrong += "another deviation\n";
    const double size = d.count + 1;  // of sums, whose terms cancel
    if (!near(one(b.dbias), d.dbias[k], size) || !near(one(b.dweight), d.dweight[k], size))
        wrong += "other gradients of parameters\n";
    const auto y = g.taken(b.y, r.x.size()), dx = g.taken(b.dx, r.x.size());
    const auto weight = static_cast<double>(g.weight[c]), bias = static_cast<double>(g.bias[c]);
    std::size_t off = 0;
    each_of(r, c, [&](std::size_t i) {
        const double normal = (static_cast<double>(r.x[i]) - d.mean) * d.inverse;
        const double back =
            (static_cast<double>(r.dy[i]) - d.of_dy / d.count - normal * d.of_both / d.count) * d.inverse * weight;
        off += near(static_cast<double>(y[i]), normal * weight + bias, 10) && near(static_cast<double>(dx[i]), back, 10)
                   ? 0
                   : 1;
    });
    if (off != 0) wrong += std::to_string(off) + " elements of rank " + std::to_string(k) + " are off\n";
    return wrong;
}

}  // namespace

std::string trouble_of_batch_norm(std::uint64_t seed) {
    return on_bounded_machine([&] {
        std::string wrong;
        batch_rig g(seed);
        if (const auto code = g.run(); code != gs::errc::none) return std::string(gs::to_string(code)) + "\n";
        for (std::size_t k = 0; k < std::size(g.ranks); ++k)
            for (std::size_t c = 0; c < g.weight.size(); ++c) wrong += channel_trouble(g, k, c);
        return wrong;
    });
}

cost cost_of_batch_norm() {
    constexpr std::size_t few = 100, many = 300;
    const auto work = [](std::size_t samples) {
        batch_rig g(1, samples);
        if (g.run() != gs::errc::none) throw std::logic_error("a batch normalisation is refused");
        (void)g.taken(g.ranks[0].on_device.dx, 1);
    };
    constexpr double more = 2.0 * 2 * 4 * (many - few);  // ranks, channels, positions
    return cost_of_more(
        "batch_norm", more, 32, [&] { work(few); }, [&] { work(many); });
}

}  // namespace jobs
