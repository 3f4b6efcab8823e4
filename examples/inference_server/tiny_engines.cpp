// SPDX-License-Identifier: Apache-2.0
// Engines without dependencies. Their weights are made up, but the computations are real.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <stdexcept>
#include <utility>

#include <gpushare/backend/sim/sim.hpp>

#include "inference_server/engine.hpp"

namespace inference_server {

namespace {

using weights = std::pmr::vector<float>;

weights made_up(std::size_t inputs, std::size_t outputs, gpushare::sim::random& any,
                std::pmr::memory_resource& memory) {
    weights w(inputs * outputs, &memory);
    const double scale = 2 / std::sqrt(static_cast<double>(inputs));
    for (auto& x : w) x = static_cast<float>(scale * (any.fraction() - 0.5));
    return w;
}

/// out = in * w, where a row of w has as many elements as `out`.
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

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, place&) override {
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

/// A recurrent network that knows 26 letters and the blank. Beside its state, it attends to all
/// earlier states, which lie in pages of its tenant.
class letters final : public engine {
public:
    letters(const surroundings& at, std::size_t longest)
        : longest_(longest),
          limit_(at.limit),
          embedding_(made_up(alphabet, state, any_, at.memory)),
          recurrent_(made_up(state, state, any_, at.memory)),
          scores_(made_up(state, alphabet, any_, at.memory)),
          query_(made_up(state, head, any_, at.memory)),
          key_(made_up(state, head, any_, at.memory)),
          cache_(
              at.cache({.lanes = 2, .token = gpushare::bytes{state * sizeof(float)}, .tokens = page, .pages = 4096})) {}

    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on) override {
        std::vector<std::string> all;
        for (const auto prompt : inputs[0].texts()) {
            all.emplace_back();
            try {
                const auto text = generate(std::string(prompt), 16);
                while (text->read_on()) give_way(on);
                // fewer than 16 at the end of the longest text
                while (const auto letter = text->next()) {
                    all.back() += *letter;
                    give_way(on);
                }
            } catch (const no_room& e) {
                throw refused(507, e.what());
            }
        }
        outputs.push_back(texts_tensor("text_output", all));
    }
    std::unique_ptr<generation> generate(const std::string& prompt, std::size_t most) override {
        if (prompt.size() > longest_) throw refused(400, "the text is too long");
        const auto in_all = std::min(prompt.size() + most, longest_);
        std::vector<std::uint32_t> pages((in_all + page - 1) / page);
        if (cache_->page_stride() * pages.size() > limit_.usage().limit()) throw refused(507, no_room().what());
        // Memory that was lent to other tenants is overwritten before it comes back, which takes
        // this long.
        const auto why = cache_->try_allocate(pages, std::chrono::steady_clock::now() + std::chrono::milliseconds(2));
        if (why.code == gpushare::errc::closed) throw refused(503, no_room().what());
        if (why.code != gpushare::errc::none) throw no_room();
        return std::make_unique<speaker>(*this, prompt, in_all, std::move(pages));
    }
    void drop_caches() noexcept override { cache_->trim(); }

private:
    static constexpr std::size_t alphabet = 27, state = 64, head = state;
    static constexpr std::uint32_t page = 16;  // in letters

    class speaker final : public generation {
    public:
        /// Gives the pages back. No work uses the text then.
        speaker(const letters& of, std::string prompt, std::size_t most, std::vector<std::uint32_t> pages)
            : of_(of), prompt_(std::move(prompt)), most_(most), pages_(std::move(pages)) {}
        speaker(const speaker&) = delete;
        speaker& operator=(const speaker&) = delete;
        ~speaker() override { (void)of_.cache_->free(pages_); }
        bool read_on() override {
            if (heard_ < prompt_.size()) hear(static_cast<unsigned char>(prompt_[heard_]) % alphabet);
            return heard_ < prompt_.size();
        }
        std::optional<std::string> next() override {
            if (heard_ == most_) return std::nullopt;
            std::array<float, alphabet> scores{};
            multiply(state_, of_.scores_, scores);
            const auto said = static_cast<std::size_t>(std::ranges::max_element(scores) - scores.begin());
            hear(said);
            return std::string(1, said == 26 ? ' ' : static_cast<char>('a' + said));
        }

    private:
        void hear(std::size_t letter) {
            std::array<float, state> h{}, seen{};
            multiply(state_, of_.recurrent_, h);
            attend(seen);
            // The last letter and the earlier states count against the new state. Otherwise the
            // network would say one letter forever.
            for (std::size_t i = 0; i < state; ++i)
                state_[i] = std::tanh(3 * h[i] - 2 * of_.embedding_[letter * state + i] - seen[i] +
                                      0.1F * static_cast<float>((heard_ * state + i + 1) % 7));
            keep();
        }
        /// Appends the state's key and value.
        void keep() {
            multiply(state_, of_.key_, lane(heard_, 0));
            std::ranges::copy(state_, lane(heard_, 1).begin());
            ++heard_;
        }
        /// The weighted mean of the states so far, with the largest weights for the states most
        /// similar to the query.
        void attend(std::span<float> to) const {
            std::array<float, head> query{};
            multiply(state_, of_.query_, query);
            float sum = 0;
            for (std::uint32_t t = 0; t < heard_; ++t) {
                const auto key = lane(t, 0), value = lane(t, 1);
                float dot = 0;
                for (std::size_t i = 0; i < head; ++i) dot += query[i] * key[i];
                const float weight = std::exp(std::clamp(dot, -20.0F, 20.0F));
                sum += weight;
                for (std::size_t i = 0; i < state; ++i) to[i] += weight * value[i];
            }
            if (sum > 0)
                for (auto& x : to) x /= sum;
        }
        /// A letter's key, or its value.
        [[nodiscard]] std::span<float> lane(std::uint32_t letter, std::uint32_t which) const {
            auto* const first = static_cast<float*>(of_.cache_->address(pages_[letter / page], which));
            return {first + std::size_t{letter % page} * state, state};
        }
        const letters& of_;
        const std::string prompt_;
        const std::size_t most_;  // in letters
        const std::vector<std::uint32_t> pages_;
        std::array<float, state> state_{};
        std::uint32_t heard_ = 0;
    };

    const std::size_t longest_;  // the longest text
    const gpushare::quota& limit_;
    gpushare::sim::random any_{2};
    weights embedding_, recurrent_, scores_, query_, key_;
    std::unique_ptr<kv_cache> cache_;
};

/// The processor time of this thread, because a computation takes longer beside others.
gpushare::ns processor_time() {
    ::timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return std::chrono::seconds(t.tv_sec) + gpushare::ns{t.tv_nsec};
}

class busy final : public engine {
public:
    explicit busy(gpushare::ns work) : work_(work) {}
    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on) override {
        const auto end = processor_time() + work_;
        if (std::ranges::any_of(inputs[0].as<float>(), [](float x) { return x < 0; }))
            throw std::runtime_error("a negative number");
        while (processor_time() < end) give_way(on);
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

model_source tiny_letters(std::size_t longest) {
    return {{"letters",
             "gpushare_tiny",
             {{"text_input", datatype::bytes, {1}}},
             {{"text_output", datatype::bytes, {1}}},
             0,
             true},
            [longest](const surroundings& at) { return std::make_unique<letters>(at, longest); }};
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
