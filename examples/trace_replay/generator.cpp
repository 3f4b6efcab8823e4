// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/generator.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <random>
#include <ranges>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace trace_replay {
namespace {

// ---- random numbers. The standard's distributions differ between libraries; these don't. ----

using engine = std::mt19937_64;

/// Uniform in [0, 1), with 53 bits.
double uniform(engine& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

std::size_t below(engine& random, std::size_t n) {
    return std::min(n - 1, static_cast<std::size_t>(uniform(random) * static_cast<double>(n)));
}

bool chance(engine& random, double p) { return uniform(random) < p; }

/// A point of a quantile function, which is linear between its points.
struct knot {
    double p, value;
};

double draw(engine& random, std::span<const knot> quantiles) {
    const double u = uniform(random);
    const auto above = std::ranges::upper_bound(quantiles.subspan(1, quantiles.size() - 2), u, {}, &knot::p);
    const knot low = *(above - 1), high = *above;
    return low.value + (high.value - low.value) * ((u - low.p) / (high.p - low.p));
}

template <class T>
struct weighted {
    T value;
    double weight;  // the weights of a table sum to 1; the last entry gets the rounding error
};

template <std::ranges::bidirectional_range Range>
const auto& pick(engine& random, const Range& table) {
    double u = uniform(random);
    for (const auto& entry : table) {
        if (u < entry.weight) return entry.value;
        u -= entry.weight;
    }
    return (std::end(table) - 1)->value;
}

// ---- measured data ----

// Seconds between the requests of a session. A session ends with a pause of 900 s.
constexpr knot gap_s[] = {{0, 0},      {0.01, 1},  {0.05, 17},  {0.1, 27},   {0.25, 41}, {0.5, 67},
                          {0.75, 123}, {0.9, 242}, {0.95, 372}, {0.99, 704}, {1, 900}};

// Requests of a session, relative to their mean: busy groups send a few huge batches, and other
// groups hardly vary.
constexpr knot bursty[] = {{0, 0.1},   {0.25, 0.2}, {0.5, 0.5},  {0.75, 1.1},
                           {0.9, 2.2}, {0.95, 3.4}, {0.99, 6.4}, {1, 14}};
constexpr knot steady[] = {{0, 0.2}, {0.25, 0.45}, {0.5, 0.9}, {0.75, 1.4}, {0.9, 1.9}, {1, 2.9}};

// A log-normal distribution with a deviation of 0.26: how groups, and the requests of a group,
// differ in seconds.
constexpr knot spread[] = {{0, 0.4},      {0.001, 0.448}, {0.01, 0.546}, {0.05, 0.652}, {0.1, 0.717},
                           {0.25, 0.839}, {0.5, 1},       {0.75, 1.192}, {0.9, 1.395},  {0.95, 1.534},
                           {0.99, 1.831}, {0.999, 2.233}, {1, 3.5}};

/// Groups from the busiest down; groups within a class are alike. The last class is so wide that
/// most of its groups never come. The first class varies less than measured, because its random
/// choices alone would shift the whole.
struct popularity_class {
    std::size_t groups;
    double session_size;  // the mean number of requests
    std::span<const knot> sizes;
};
constexpr std::array<weighted<popularity_class>, 6> classes{{{{1, 29.8, steady}, 0.0064},
                                                             {{9, 11, bursty}, 0.0411},
                                                             {{40, 9.6, bursty}, 0.0645},
                                                             {{150, 7.2, bursty}, 0.0947},
                                                             {{800, 4.9, steady}, 0.2232},
                                                             {{20000, 2.0, steady}, 0.5701}}};

struct model_profile {
    std::size_t id;
    double seconds;  // the median with 30 steps and no LoRA
    double with_loras;
};
constexpr std::size_t rare_model = 79;  // stands for all rarer models
constexpr std::size_t first_rare = 100, num_rare = 68;
constexpr std::size_t model_with_40_steps = 1;
// Weights outside of the ten busiest groups, which have favourites of their own.
constexpr std::array<weighted<model_profile>, 12> models{{{{2, 18, 0.001}, 0.3582},
                                                          {{1, 34, 0.315}, 0.1273},
                                                          {{4, 20.5, 0.083}, 0.1105},
                                                          {{10, 19.5, 0.161}, 0.0797},
                                                          {{0, 22.5, 0.008}, 0.0504},
                                                          {{3, 54, 0.966}, 0.0383},
                                                          {{11, 40, 0}, 0.0324},
                                                          {{16, 21.5, 0.006}, 0.0311},
                                                          {{6, 21.5, 0.058}, 0.0309},
                                                          {{14, 22.5, 0}, 0.0246},
                                                          {{26, 20, 0.061}, 0.0115},
                                                          {{rare_model, 21.5, 0.2}, 0.1051}}};

// The favourite models of the ten busiest groups (by id), and how often they ask for them.
constexpr std::array<std::pair<std::size_t, double>, 10> favourites{
    {{26, 0.58}, {1, 0.69}, {3, 0.89}, {1, 0.98}, {3, 0.70}, {3, 0.86}, {1, 0.58}, {10, 0.93}, {3, 0.96}, {2, 0.91}}};
constexpr double usual_favour = 0.55;

using count = weighted<std::uint32_t>;
constexpr count usual_steps[] = {{30, 0.9582}, {28, 0.0085},  {35, 0.0049}, {40, 0.0037}, {25, 0.0032}, {50, 0.0029},
                                 {20, 0.0028}, {100, 0.0018}, {60, 0.0015}, {33, 0.0012}, {44, 0.0012}, {45, 0.0011},
                                 {26, 0.0009}, {34, 0.0008},  {8, 0.0008},  {68, 0.0007}, {38, 0.0058}};
constexpr count other_steps[] = {{30, 0.6217}, {40, 0.32},   {38, 0.0229},  {50, 0.0186},
                                 {25, 0.0075}, {35, 0.0048}, {100, 0.0010}, {37, 0.0035}};
constexpr count lora_counts[] = {{1, 0.934}, {2, 0.0564}, {3, 0.008}, {4, 0.0007}, {6, 0.0009}};

// How often a request repeats the choice of the session's previous request.
constexpr double same_model = 0.55, same_steps = 0.93, same_loras = 0.97;

// Sessions that start, relative to their mean, by hour and by weekday from Monday.
constexpr double by_hour[24] = {3.39, 0.94, 1.10, 0.88, 0.48, 0.31, 0.26, 0.14, 0.08, 0.02, 0.02, 0.01,
                                0,    0.01, 0,    0.03, 0.75, 2.33, 2.36, 0.47, 1.26, 2.99, 2.95, 3.21};
constexpr double by_weekday[7] = {1.30, 1.21, 1.13, 1.44, 0.76, 0.26, 0.90};
constexpr double sessions_per_day = 273;
constexpr std::int64_t day_s = 86400;

constexpr std::chrono::sys_days monday = std::chrono::year{2024} / 11 / 18;

// ---- the model ----

struct group_profile {
    std::string name;
    model_profile favourite;
    double favour;  // how often the group asks for its favourite
    double pace;    // the group's factor on seconds
};

std::string numbered(char letter, std::size_t n) {
    const std::string digits = std::to_string(n);
    return letter + std::string(4 - std::min<std::size_t>(4, digits.size()), '0') + digits;
}

class population {
public:
    explicit population(engine& random) {
        for (const auto& c : classes) {
            for (std::size_t i = 0; i < c.value.groups; ++i) groups_.push_back(make_group(random));
        }
    }

    struct member {
        const group_profile* group;
        const popularity_class* kind;
    };
    [[nodiscard]] member choose(engine& random) const {
        const popularity_class& kind = pick(random, classes);
        std::size_t first = 0;
        for (const auto* c = classes.data(); &c->value != &kind; ++c) first += c->value.groups;
        return {&groups_[first + below(random, kind.groups)], &kind};
    }

private:
    [[nodiscard]] group_profile make_group(engine& random) const {
        const std::size_t rank = groups_.size();
        group_profile g{numbered('G', rank), pick(random, models), usual_favour,
                        draw(random, spread)};  // drawn from left to right
        if (rank < favourites.size()) {
            const auto [id, favour] = favourites[rank];
            const auto is_it = [id = id](const auto& m) { return m.value.id == id; };
            g.favourite = std::ranges::find_if(models, is_it)->value;
            g.favour = favour;
            g.pace = 1;
        }
        return g;
    }

    std::vector<group_profile> groups_;
};

/// Generates the requests of a session, one after the other.
class asker {
public:
    explicit asker(const group_profile& group) noexcept : group_(&group) {}

    request next(engine& random) {
        if (!model_ || !chance(random, same_model)) choose_model(random);
        if (steps_ == 0 || !chance(random, same_steps)) choose_steps(random);
        if (!loras_ || !chance(random, same_loras)) choose_loras(random);
        const double per_steps = 1 + 0.008 * (static_cast<double>(steps_) - 30);
        const double per_loras = *loras_ > 0 ? 1.25 : 1;
        const double seconds = model_->seconds * group_->pace * draw(random, spread) * per_steps * per_loras;
        const auto whole_seconds = std::max<std::int64_t>(3, static_cast<std::int64_t>(seconds + 0.5));
        return {0, group_->name, name_, steps_, *loras_, static_cast<double>(whole_seconds)};
    }

private:
    void choose_model(engine& random) {
        const auto before = model_ ? model_->id : rare_model + 1;
        model_ = chance(random, group_->favour) ? group_->favourite : pick(random, models);
        // Squared, because the first of the rare models are less rare.
        const double u = uniform(random);
        const auto rare = first_rare + static_cast<std::size_t>(u * u * num_rare);
        name_ = numbered('M', model_->id == rare_model ? rare : model_->id);
        if (model_->id == before) return;
        steps_ = 0;  // steps and LoRAs depend on the model
        loras_.reset();
    }

    void choose_steps(engine& random) {
        const std::span<const count> table = model_->id == model_with_40_steps ? std::span<const count>(other_steps)
                                                                               : std::span<const count>(usual_steps);
        steps_ = pick(random, table);
    }

    void choose_loras(engine& random) {
        const bool any = chance(random, model_->with_loras);
        loras_ = any ? pick(random, lora_counts) : 0;
    }

    const group_profile* group_;
    std::optional<model_profile> model_;
    std::string name_;
    std::uint32_t steps_ = 0;
    std::optional<std::uint32_t> loras_;
};

bool session_starts(engine& random, std::int64_t second) {
    const auto hour = static_cast<std::size_t>(second % day_s / 3600);
    const auto weekday = static_cast<std::size_t>(second / day_s % 7);
    return chance(random, sessions_per_day / static_cast<double>(day_s) * by_weekday[weekday] * by_hour[hour]);
}

void add_session(engine& random, const population& people, double start_s, std::vector<request>& requests) {
    const auto [group, kind] = people.choose(random);
    const double size = kind->session_size * draw(random, kind->sizes);
    asker asks(*group);
    double now_s = start_s;
    for (std::int64_t left = std::max<std::int64_t>(1, static_cast<std::int64_t>(size + 0.5)); left > 0; --left) {
        requests.push_back(asks.next(random));
        requests.back().arrival_s = now_s;
        now_s += static_cast<double>(static_cast<std::int64_t>(draw(random, gap_s)));
    }
}

}  // namespace

trace generate(std::uint64_t seed, std::size_t requests) {
    engine random(seed);
    const population people(random);
    trace result;
    auto& all = result.requests;

    // Sessions overlap, so generation continues until no later session can add to the first
    // `requests` arrivals.
    const auto complete_by = [&all, requests](double now_s) {
        return std::cmp_greater_equal(
            std::ranges::count_if(all, [now_s](const request& r) { return r.arrival_s < now_s; }), requests);
    };
    for (std::int64_t second = 0;; ++second) {
        const auto now_s = static_cast<double>(second);
        if (all.size() >= requests && second % 600 == 0 && complete_by(now_s)) break;
        if (session_starts(random, second)) add_session(random, people, now_s, all);
    }
    std::ranges::stable_sort(all, {}, &request::arrival_s);
    all.resize(requests);

    result.start = std::chrono::sys_seconds{monday};
    if (!all.empty()) {
        const double first_s = all.front().arrival_s;
        for (request& r : all) r.arrival_s -= first_s;
        result.start += std::chrono::seconds{static_cast<std::int64_t>(first_s)};
    }
    result.summary.rows = result.summary.kept = requests;
    return result;
}

}  // namespace trace_replay
