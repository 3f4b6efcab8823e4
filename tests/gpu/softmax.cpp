// SPDX-License-Identifier: Apache-2.0
#include "gpu/softmax.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/host/host.hpp>

#include "gpu/job_rig.hpp"

namespace jobs {

namespace gs = gpushare;

namespace {

constexpr std::uint32_t ranks = 2;
constexpr std::size_t block = 256;  // threads
constexpr std::size_t room = std::size_t{1} << 22;

/// Sizes, and each rank's numbers.
struct softmax_input {
    std::size_t classes = 0, features = 0, samples = 0;  // samples of a rank
    gs::partial_softmax_options options{};
    bool exact = false;
    std::vector<float> x[ranks], weights[ranks];
    std::vector<std::int64_t> labels;  // of all ranks

    [[nodiscard]] gs::device_partial_softmax layer() const {
        gs::device_partial_softmax l(ranks, classes, features, samples, options);
        l.choose(labels);
        return l;
    }
};

struct softmax_results {
    std::vector<float> dx[ranks], gradient[ranks];
    float loss[ranks]{};
};

class input_maker {
public:
    explicit input_maker(std::uint64_t seed) : any_(seed) {
        made_.exact = seed % 2 == 0;
        choose_sizes();
        made_.options = {.rate = made_.exact || below(2) == 0 ? 1 : 0.3, .seed = seed};
        fill();
    }
    /// So many samples of a rank, each of which counts.
    input_maker(std::size_t classes, std::size_t features, std::size_t samples) : any_(1) {
        made_.classes = classes;
        made_.features = features;
        made_.samples = samples;
        fill();
        for (std::size_t s = 0; s < made_.labels.size(); ++s) made_.labels[s] = static_cast<std::int64_t>(s % classes);
    }
    [[nodiscard]] const softmax_input& made() const { return made_; }

private:
    [[nodiscard]] std::size_t below(std::size_t n) { return any_() % n; }

    // One loop in three is as long as a block has threads, or longer. Exact numbers take a power of
    // two of classes: all logits of a sample are equal, so each class gets one part of so many.
    void choose_sizes() {
        const std::size_t which = below(6);
        made_.samples = which == 0 ? block / ranks : 1 + below(9);
        made_.features = which == 1 ? block : which == 2 ? 1 + below(2 * block) : 1 + below(12);
        made_.classes = which == 3 ? 4 * block : std::size_t{2} << below(5);
        if (!made_.exact) made_.classes = 1 + below(2 * made_.classes);
    }
    [[nodiscard]] float number() {
        return made_.exact ? static_cast<float>(below(9)) - 4 : (static_cast<float>(below(2001)) - 1000) / 997;
    }
    /// A label that doesn't count: below all classes, or the first behind them.
    [[nodiscard]] std::int64_t no_class() {
        return below(2) == 0 ? gs::partial_softmax::ignored : static_cast<std::int64_t>(made_.classes);
    }
    void fill() {
        std::vector<float> row(made_.features);
        for (float& w : row) w = number();
        for (std::uint32_t r = 0; r < ranks; ++r) {
            const std::size_t own = gs::shard_of(made_.classes, r, ranks).size();
            for (std::size_t i = 0; i < made_.samples * made_.features; ++i) made_.x[r].push_back(number());
            for (std::size_t i = 0; i < own * made_.features; ++i)
                made_.weights[r].push_back(made_.exact ? row[i % made_.features] : number() / 4);
        }
        // Features lie behind the labels: whoever reads a label too many finds class 0 there.
        made_.x[0][0] = made_.x[0][1 % made_.x[0].size()] = 0;
        const std::size_t all = ranks * made_.samples, counted = made_.exact ? std::bit_floor(1 + below(all)) : all;
        for (std::size_t s = 0; s < all; ++s)
            made_.labels.push_back(s < counted && (made_.exact || below(6) != 0)
                                       ? static_cast<std::int64_t>(below(made_.classes))
                                       : no_class());
        std::shuffle(made_.labels.begin(), made_.labels.end(), any_);
    }

    std::mt19937_64 any_;
    softmax_input made_{};
};

/// A step of ranks that share a stream, in one piece of the device's memory.
template <class Node, class Stream>
class softmax_rig {
public:
    softmax_rig(Node& node, Stream stream) : node_(node), stream_(std::move(stream)) {
        at_ = memory_ = static_cast<std::byte*>(node_.memory({0}).allocate(room, 256));
    }
    softmax_rig(const softmax_rig&) = delete;
    softmax_rig& operator=(const softmax_rig&) = delete;
    ~softmax_rig() { (void)node_.memory({0}).deallocate(memory_, room, 256); }

    template <class Submit>
    [[nodiscard]] std::pair<gs::errc, softmax_results> run(const softmax_input& in, const Submit& submit) {
        gs::device_partial_softmax layer = in.layer();
        std::vector<gs::device_softmax_rank> on_device;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            const auto labels = std::span(in.labels).subspan(r * in.samples, in.samples);
            on_device.push_back({.x = bring<float>(in.x[r]),
                                 .labels = bring<std::int64_t>(labels),
                                 .weights = bring<float>(in.weights[r]),
                                 .dx = make<float>(in.x[r].size()),
                                 .gradient = make<float>(in.weights[r].size()),
                                 .loss = make<float>(1),
                                 .scratch = make<std::byte>(layer.scratch_bytes().count())});
        }
        const combines combine = [this](auto ins, auto outs, std::size_t n, combination how) {
            combined(ins, outs, n, how);
        };
        const gs::errc why = submit(stream_, layer, std::span<const gs::device_softmax_rank>(on_device), combine);
        (void)stream_.record().wait(gs::never);
        softmax_results got;
        for (std::uint32_t r = 0; r < ranks && why == gs::errc::none; ++r) {
            got.dx[r] = taken(on_device[r].dx, in.x[r].size());
            got.gradient[r] = taken(on_device[r].gradient, layer.rows(r).size() * in.features);
            got.loss[r] = taken(on_device[r].loss, 1)[0];
        }
        return {why, std::move(got)};
    }

private:
    void combined(std::span<const float* const> ins, std::span<float* const> outs, std::size_t n, combination how) {
        const std::size_t all = how == combination::scattered ? n * outs.size() : n;
        std::vector<float> whole = taken(ins[0], all);
        for (const float* const in : ins.subspan(1)) {
            const std::vector<float> one = taken(in, all);
            for (std::size_t i = 0; i < all; ++i)
                whole[i] = how == combination::largest ? std::max(whole[i], one[i]) : whole[i] + one[i];
        }
        for (std::size_t r = 0; r < outs.size(); ++r)
            put<float>(outs[r], std::span(whole).subspan(how == combination::scattered ? r * n : 0, n));
    }
    [[nodiscard]] std::vector<float> taken(const float* from, std::size_t n) {
        std::vector<float> to(n);
        stream_.copy(to.data(), from, n * sizeof(float));
        (void)stream_.record().wait(gs::never);
        return to;
    }
    template <class T>
    void put(T* to, std::span<const T> from) {
        stream_.copy(to, from.data(), from.size_bytes());
        (void)stream_.record().wait(gs::never);
    }
    /// The executor finds reads of what nobody has written.
    template <class T>
    [[nodiscard]] T* make(std::size_t n) {
        T* const begin = reinterpret_cast<T*>(at_);
        at_ += (n * sizeof(T) + 511) / 256 * 256;
        return begin;
    }
    template <class T>
    [[nodiscard]] T* bring(std::span<const T> x) {
        T* const to = make<T>(x.size());
        put(to, x);
        return to;
    }

    Node& node_;
    Stream stream_;
    std::byte *memory_ = nullptr, *at_ = nullptr;
};

bool same(const std::vector<float>& got, const std::vector<float>& wanted, bool exact) {
    return std::ranges::equal(got, wanted, [exact](float a, float b) {
        if (exact) return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
        return std::abs(a - b) <= 1e-5F * (1 + std::abs(b));
    });
}

std::string difference(const softmax_results& got, const softmax_results& wanted, bool exact) {
    std::string wrong;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        const std::string of = " on rank " + std::to_string(r) + (exact ? ", of exact numbers\n" : "\n");
        if (!same({got.loss[r]}, {wanted.loss[r]}, exact)) wrong += "another loss" + of;
        if (!same(got.dx[r], wanted.dx[r], exact)) wrong += "another gradient by features" + of;
        if (!same(got.gradient[r], wanted.gradient[r], exact)) wrong += "another gradient by weights" + of;
    }
    return wrong;
}

}  // namespace

std::string trouble_of_softmax(std::uint64_t seed) {
    const input_maker input(seed);
    gs::host::node host({.devices = 1, .memory = gs::bytes{2 * room}, .sms = 4});
    const auto wanted = softmax_rig(host, host.make_stream({0})).run(input.made(), softmax_step<gs::host::stream>);
    if (wanted.first != gs::errc::none) return "the host refuses the step\n";
    return on_bounded_machine([&] {
        gs::cuda::node node;
        const auto got = softmax_rig(node, node.make_stream({0}, gs::priority{})).run(input.made(), softmax_on_device);
        if (got.first != gs::errc::none) return std::string(gs::to_string(got.first)) + "\n";
        return difference(got.second, wanted.second, input.made().exact);
    });
}

cost cost_of_softmax() {
    constexpr std::size_t classes = 32, samples = 4, few = 256, many = 768;  // as many features as threads, or more
    const auto work = [](std::size_t features) {
        const input_maker input(classes, features, samples);
        gs::cuda::node node;
        const auto got = softmax_rig(node, node.make_stream({0}, gs::priority{})).run(input.made(), softmax_on_device);
        if (got.first != gs::errc::none) throw std::logic_error("a softmax is refused");
    };
    // Each rank has all samples and its own classes.
    constexpr double of_samples = ranks * samples, of_classes = classes / double{ranks};
    constexpr double more = ranks * of_samples * of_classes * (many - few);
    return cost_of_more(
        "softmax", more, 8 * (of_samples + of_classes) / (of_samples * of_classes), [&] { work(few); },
        [&] { work(many); });
}

}  // namespace jobs
