// SPDX-License-Identifier: Apache-2.0
// Engines without dependencies. Their weights are made up, what they compute with them isn't.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <stdexcept>
#include <utility>

#include <gpushare/backend/sim/random.hpp>

#include "inference_server/engine.hpp"

namespace inference_server {

std::unique_ptr<generation> engine::generate(const std::string&) { throw refused(400, "the model doesn't stream"); }

namespace {

using weights = std::pmr::vector<float>;

weights made_up(std::size_t inputs, std::size_t outputs, gpushare::sim::random& any,
                std::pmr::memory_resource& memory) {
    weights w(inputs * outputs, &memory);
    const double scale = 2 / std::sqrt(static_cast<double>(inputs));
    for (auto& x : w) x = static_cast<float>(scale * (any.fraction() - 0.5));
    return w;
}

/// out = in * w, w in rows of `out`'s size.
void multiply(std::span<const float> in, const weights& w, std::span<float> out) {
    std::ranges::fill(out, 0.0F);
    const float* row = w.data();
    for (const float x : in)
        for (auto& y : out) y += x * *row++;
}

class mlp final : public engine {
public:
    static constexpr std::size_t in = 16, hidden = 32, out = 4;
    explicit mlp(std::pmr::memory_resource& memory)
        : first_(made_up(in, hidden, any_, memory)), second_(made_up(hidden, out, any_, memory)) {}

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, gpushare::host::kernel_context&) override {
        const auto x = inputs[0].as<float>();
        const auto rows = static_cast<std::size_t>(inputs[0].shape[0]);
        tensor y{
            "OUTPUT", datatype::fp32, {inputs[0].shape[0], out}, std::vector<std::byte>(rows * out * sizeof(float))};
        std::array<float, hidden> h{};
        for (std::size_t r = 0; r < rows; ++r) {
            multiply(x.subspan(r * in, in), first_, h);
            for (auto& v : h) v = std::max(v, 0.0F);
            multiply(h, second_, y.as<float>().subspan(r * out, out));
        }
        outputs.push_back(std::move(y));
    }

private:
    gpushare::sim::random any_{1};
    weights first_, second_;
};

/// A recurrent network that knows 26 letters and the blank.
class letters final : public engine {
public:
    explicit letters(std::pmr::memory_resource& memory)
        : embedding_(made_up(alphabet, state, any_, memory)),
          recurrent_(made_up(state, state, any_, memory)),
          scores_(made_up(state, alphabet, any_, memory)) {}

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, gpushare::host::kernel_context&) override {
        std::vector<std::string> all;
        for (const auto prompt : inputs[0].texts()) {
            const auto text = generate(std::string(prompt));
            all.emplace_back();
            for (int i = 0; i < 16; ++i) all.back() += *text->next();
        }
        outputs.push_back(texts_tensor("text_output", all));
    }
    std::unique_ptr<generation> generate(const std::string& prompt) override {
        return std::make_unique<speaker>(*this, prompt);
    }

private:
    static constexpr std::size_t alphabet = 27, state = 64;

    class speaker final : public generation {
    public:
        speaker(const letters& of, const std::string& prompt) : of_(of) {
            for (const char c : prompt) hear(static_cast<unsigned char>(c) % alphabet);
        }
        std::optional<std::string> next() override {
            std::array<float, alphabet> scores{};
            multiply(state_, of_.scores_, scores);
            const auto said = static_cast<std::size_t>(std::ranges::max_element(scores) - scores.begin());
            hear(said);
            return std::string(1, said == 26 ? ' ' : static_cast<char>('a' + said));
        }

    private:
        void hear(std::size_t letter) {
            std::array<float, state> h{};
            multiply(state_, of_.recurrent_, h);
            // It gets bored, or it would say one letter for ever.
            for (std::size_t i = 0; i < state; ++i)
                state_[i] = std::tanh(3 * h[i] - 2 * of_.embedding_[letter * state + i] +
                                      0.1F * static_cast<float>(++heard_ % 7));
        }
        const letters& of_;
        std::array<float, state> state_{};
        std::uint32_t heard_ = 0;
    };

    gpushare::sim::random any_{2};
    weights embedding_, recurrent_, scores_;
};

/// Of this thread: what is computed takes longer beside others.
gpushare::ns processor_time() {
    ::timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return std::chrono::seconds(t.tv_sec) + gpushare::ns{t.tv_nsec};
}

class busy final : public engine {
public:
    explicit busy(gpushare::ns work) : work_(work) {}
    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs,
             gpushare::host::kernel_context& on) override {
        const auto end = processor_time() + work_;
        if (std::ranges::any_of(inputs[0].as<float>(), [](float x) { return x < 0; }))
            throw std::runtime_error("a negative number");
        while (processor_time() < end) gpushare::yield_point(on);
        outputs.push_back(inputs[0]);
        outputs.back().name = "OUTPUT";
    }

private:
    gpushare::ns work_;
};

}  // namespace

model_source tiny_mlp() {
    return {{"mlp",
             "gpushare_tiny",
             {{"INPUT", datatype::fp32, {-1, mlp::in}}},
             {{"OUTPUT", datatype::fp32, {-1, mlp::out}}},
             32,
             false},
            [](std::pmr::memory_resource& memory) { return std::make_unique<mlp>(memory); }};
}

model_source tiny_letters() {
    return {{"letters",
             "gpushare_tiny",
             {{"text_input", datatype::bytes, {1}}},
             {{"text_output", datatype::bytes, {1}}},
             0,
             true},
            [](std::pmr::memory_resource& memory) { return std::make_unique<letters>(memory); }};
}

model_source busy_model(std::string name, gpushare::ns work) {
    return {{std::move(name),
             "gpushare_tiny",
             {{"INPUT", datatype::fp32, {-1, 1}}},
             {{"OUTPUT", datatype::fp32, {-1, 1}}},
             8,
             false},
            [work](std::pmr::memory_resource&) { return std::make_unique<busy>(work); }};
}

}  // namespace inference_server
