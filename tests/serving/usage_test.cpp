// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Usage as lines of text and as bills: round trips, torn lines, and sums that are exact however
// time is divided.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gpushare/serving/usage_journal.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/folder.hpp"
#include "support/random.hpp"

namespace usage_test {
namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::byte_time;
using gpushare::errc;
using gpushare::ns;
using gpushare::usage_amounts;
using gpushare::usage_invoices;
using gpushare::usage_journal;
using gpushare::usage_line;
using gpushare::usage_reading;
using gpushare::wall_time;

wall_time at(ns since) { return wall_time{ns{1'800'000'000'000'000'000} + since}; }

usage_line some_line(support::random& any, std::string_view tenant, wall_time from) {
    const auto length = ns{1 + static_cast<std::int64_t>(any.below(3'600'000'000'000))};
    return {std::string(tenant),
            from,
            from + length,
            {ns{static_cast<std::int64_t>(any.below(1ULL << 56))},
             {gpushare::bytes{any.below(1ULL << 48)}, length},
             {gpushare::bytes{any.below(1ULL << 40)}, length},
             any.below(1ULL << 40),
             any.below(100)}};
}

struct temporary : support::folder {
    [[nodiscard]] std::string file() const { return *this / "usage"; }
};
std::vector<usage_line> lines_of(const std::string& file, std::size_t* torn = nullptr) {
    std::vector<usage_line> all;
    const auto bad = usage_journal::read(file, [&](const usage_line& l) { all.push_back(l); });
    if (torn != nullptr) *torn = bad;
    return all;
}

}  // namespace

TEST_CASE("a usage line comes back, whatever the name", "[serving]") {
    support::random any(support::seed(1));
    for (std::string_view name : {"chat", "a b", "100%", "\n", "x\r\ny", "\x7f", "caf\xc3\xa9", "%41", " ", "~"}) {
        CAPTURE(name);
        const auto line = some_line(any, name, at(5s));
        const auto text = to_text(line);
        CHECK(std::ranges::count(text, '\n') == 1);
        const auto back = gpushare::parse_usage_line(std::string_view(text).substr(0, text.size() - 1));
        REQUIRE(back);
        CHECK(*back == line);
    }
    // Memory over time has more than 64 bits.
    usage_line big{"big", at(0s), at(3600s), {0ns, {512_GiB, 3600s}, {}, 0, 0}};
    const auto text = to_text(big);
    CHECK(text.find(" 1979120929996800000000000 ") != std::string::npos);
    CHECK(gpushare::parse_usage_line(std::string_view(text).substr(0, text.size() - 1)) == big);
}

TEST_CASE("a line that was torn or changed is no line", "[serving]") {
    support::random any(support::seed(2));
    const auto text = to_text(some_line(any, "chat", at(0s)));
    const std::string_view whole(text.data(), text.size() - 1);
    for (std::size_t n = 0; n < whole.size(); ++n) CHECK_FALSE(gpushare::parse_usage_line(whole.substr(0, n)));
    for (std::size_t n = 0; n < whole.size(); ++n)
        for (const char c : {'0', '9', ' ', 'a', '\0', '%'}) {
            std::string changed(whole);
            if (changed[n] == c) continue;
            changed[n] = c;
            CHECK_FALSE(gpushare::parse_usage_line(changed));
        }
}

TEST_CASE("a line that is no line is refused though its checksum is right", "[serving]") {
    const auto summed = [](std::string text) { return text += ' ' + gpushare::detail::checksum_text(text); };
    CHECK(gpushare::parse_usage_line(summed("1 2 3 4 5 6 7 chat")));
    for (const char* bad :
         {"2 1 3 4 5 6 7 chat", "1 1 3 4 5 6 7 chat", "1 2 3 4 5 6 7 ", "1 2 3 4 5 6 7", "1 2 3 4 5 6 7 a b",
          "1 2 -3 4 5 6 7 chat", "1 2 3 4 5 6 18446744073709551616 chat", "9223372036854775808 2 3 4 5 6 7 chat",
          "1 2 3 340282366920938463463374607431768211456 5 6 7 chat", "1 2 3 4 5 6 7 %4", "1 2 3 4 5 6 7 %41",
          "1 2 3 4 5 6 7 %0a", "1  2 3 4 5 6 7 chat", "", " "}) {
        CAPTURE(bad);
        CHECK_FALSE(gpushare::parse_usage_line(summed(bad)));
    }
}

TEST_CASE("the reader of usage takes any input", "[serving]") {
    const int rounds = 3000;
    const auto seed = support::seed(3);
    CAPTURE(seed);
    support::random any(seed);
    for (int round = 0; round < rounds; ++round) {
        std::string text;
        std::size_t whole = 0;
        std::vector<std::string> lines;
        for (auto n = any.below(5); n != 0; --n) lines.push_back(to_text(some_line(any, "t", at(0s))));
        for (const auto& l : lines) text += l;
        std::string damaged = text;
        for (auto n = any.below(4); n != 0 && !damaged.empty(); --n) {
            const auto where = any.below(damaged.size());
            switch (any.below(3)) {
                case 0: damaged[where] = static_cast<char>(any.below(256)); break;
                case 1: damaged.erase(where, 1 + any.below(20)); break;
                default: damaged.insert(where, 1, static_cast<char>(any.below(256)));
            }
        }
        (void)gpushare::read_usage(damaged, [&](const usage_line& l) {
            ++whole;
            // What is accepted is one of those that were written.
            CHECK(std::ranges::find(lines, to_text(l)) != lines.end());
        });
        CHECK(whole <= lines.size());
        CHECK(gpushare::read_usage(text, [](const usage_line&) {}) == 0);
    }
}

TEST_CASE("bills of any periods side by side sum to that of the whole", "[serving]") {
    const auto seed = support::seed(4);
    CAPTURE(seed);
    support::random any(seed);
    for (int round = 0; round < 200; ++round) {
        std::vector<usage_line> lines;
        auto t = at(0s);
        for (int n = 0; n < 20; ++n) {
            lines.push_back(some_line(any, any.one_in(2) ? "chat" : "code", t));
            if (any.one_in(2)) t = lines.back().until;
        }
        std::vector<wall_time> cuts{at(-1s)};
        for (auto n = any.below(10); n != 0; --n)
            cuts.push_back(at(ns{static_cast<std::int64_t>(any.below(100'000'000'000'000))}));
        cuts.push_back(at(1000h));
        std::ranges::sort(cuts);
        std::array<usage_amounts, 2> sum{}, whole{};
        for (const auto& l : lines) whole[l.tenant == "code"] += l.amounts;
        for (std::size_t i = 1; i < cuts.size(); ++i) {
            usage_invoices part(cuts[i - 1], cuts[i]);
            for (const auto& l : lines) part.add(l);
            sum[0] += part.of("chat");
            sum[1] += part.of("code");
            CHECK(part.of("nobody") == usage_amounts{});
        }
        CHECK(sum == whole);
    }
}

TEST_CASE("readings become lines that sum to the usage", "[serving]") {
    gpushare::usage_meter meter("chat");
    CHECK_FALSE(meter.read(at(0s), {.device_time = 5ms, .reserved = 4_MiB, .used = 1_MiB, .requests = 2}));
    const auto first = meter.read(at(1s), {.device_time = 7ms, .reserved = 8_MiB, .used = 3_MiB, .requests = 5});
    REQUIRE(first);
    CHECK(*first == usage_line{"chat", at(0s), at(1s), {2ms, {4_MiB, 1s}, {1_MiB, 1s}, 3, 0}});
    // Nothing happened, and no time passed.
    CHECK_FALSE(meter.read(at(1s), {.device_time = 7ms, .reserved = 8_MiB, .used = 3_MiB, .requests = 5}));
    CHECK(*meter.read(at(2s), {.device_time = 9ms, .reserved = 8_MiB, .used = 0_B, .requests = 7, .refusals = 1}) ==
          usage_line{"chat", at(1s), at(2s), {2ms, {8_MiB, 1s}, {3_MiB, 1s}, 2, 1}});
    // Admitted anew, its counters begin anew, and the meter is told so.
    meter.restarted();
    CHECK(*meter.read(at(3s), {.device_time = 1ms, .reserved = 8_MiB, .used = 2_MiB, .requests = 1}) ==
          usage_line{"chat", at(2s), at(3s), {1ms, {8_MiB, 1s}, {}, 1, 0}});
}

TEST_CASE("requests are billed while the clock is behind where it was, and memory from then on", "[serving]") {
    gpushare::usage_meter meter("chat");
    usage_invoices all(at(-100h), at(100h));
    std::uint64_t lines = 0;
    const auto read = [&](ns when, std::uint64_t requests) {
        if (const auto l = meter.read(at(when), {.reserved = 1_MiB, .requests = requests})) {
            CHECK(l->from < l->until);
            all.add(*l);
            ++lines;
        }
    };
    for (std::uint64_t n = 0; n <= 5; ++n) read(n * 1s, n);
    for (std::uint64_t n = 6; n <= 105; ++n) read(n * 1s - 1h, n);  // set back at one reading
    CHECK(all.of("chat").requests == 105);
    CHECK(all.of("chat").reserved == byte_time(1_MiB, 104s));  // but for that one
    CHECK(lines == 105);
    // Where no time passes, what happened has a line as well: a meter that is dropped owes nothing.
    read(105s - 1h, 107);
    CHECK(all.of("chat").requests == 107);
}

TEST_CASE("by a steady clock memory is billed for the time that passed, whatever the day says", "[serving]") {
    gpushare::usage_meter meter("chat");
    usage_invoices all(at(-100h), at(100h));
    const gpushare::instant begin{7s};
    const usage_reading r{.reserved = 1_MiB};
    for (const auto& [day, passed] : {std::pair<ns, ns>{0s, 0s}, {1s, 1s}, {1h, 2s}, {2s, 3s}, {-1h, 4s}, {5s, 5s}})
        if (const auto l = meter.read(at(day), begin + passed, r)) {
            CHECK(l->until - l->from == 1s);
            CHECK(l->until == at(day));
            all.add(*l);
        }
    CHECK(all.of("chat").reserved == byte_time(1_MiB, 5s));
}

TEST_CASE("a counter that falls without a word is never billed twice", "[serving]") {
    gpushare::usage_meter meter("chat");
    CHECK_FALSE(meter.read(at(0s), {.device_time = 5ms, .requests = 100, .refusals = 7}));
    const auto fallen = meter.read(at(1s), {.device_time = 1ms, .requests = 103, .refusals = 6});
    REQUIRE(fallen);
    CHECK(fallen->amounts.device_time == 0ms);
    CHECK(fallen->amounts.requests == 3);
    CHECK(fallen->amounts.refusals == 0);
    const auto passed = meter.read(at(2s), {.device_time = 6ms, .requests = 103, .refusals = 7});
    REQUIRE(passed);
    CHECK(passed->amounts.device_time == 1ms);
    CHECK(passed->amounts.refusals == 0);
    // A restart is told; what is kept elsewhere goes on.
    meter.restarted({.requests = 103, .refusals = 7});
    const auto anew = meter.read(at(3s), {.device_time = 2ms, .requests = 104, .refusals = 9});
    REQUIRE(anew);
    CHECK(anew->amounts.device_time == 2ms);
    CHECK(anew->amounts.requests == 1);
    CHECK(anew->amounts.refusals == 2);
}

TEST_CASE("memory is billed alike however often it is read", "[serving]") {
    const auto seed = support::seed(5);
    CAPTURE(seed);
    // The memory of a tenant as steps in time; read at each step, and some more times.
    std::array<usage_amounts, 2> sums{};
    for (const bool often : {false, true}) {
        support::random steps(seed), any(seed + 1);
        gpushare::usage_meter meter("chat");
        ns t{};
        const auto read = [&](ns when, const usage_reading& r) {
            if (const auto l = meter.read(at(when), r)) sums[often] += l->amounts;
        };
        for (int step = 0; step < 100; ++step) {
            const usage_reading now{.reserved = gpushare::bytes{steps.below(1ULL << 40)},
                                    .used = gpushare::bytes{steps.below(1ULL << 40)}};
            const auto length = 1 + steps.below(1'000'000'000);
            read(t, now);
            std::vector<std::uint64_t> more(often ? any.below(4) : 0);
            for (auto& when : more) when = any.below(length);
            std::ranges::sort(more);
            for (const auto when : more) read(t + ns{static_cast<std::int64_t>(when)}, now);
            t += ns{static_cast<std::int64_t>(length)};
        }
        read(t, {});
    }
    CHECK(sums[0].reserved != byte_time{});
    CHECK(sums[0] == sums[1]);
}

TEST_CASE("a journal keeps what was appended, over restarts and rotations", "[serving]") {
    const temporary here;
    support::random any(support::seed(6));
    std::vector<usage_line> all;
    auto t = at(0s);
    for (int run = 0; run < 3; ++run) {
        usage_journal journal(here.file(), {.rotate_at = 1_KiB, .sync = run == 0});
        for (int n = 0; n < 10; ++n) {
            std::vector<usage_line> some;
            for (auto k = 1 + any.below(3); k != 0; --k) some.push_back(some_line(any, "chat", t));
            t = some.back().until;
            journal.append(some);
            all.insert(all.end(), some.begin(), some.end());
        }
        CHECK(lines_of(here.file()) == all);  // while it is open, too
    }
    std::size_t torn = 0;
    CHECK(lines_of(here.file(), &torn) == all);
    CHECK(torn == 0);
    CHECK(std::ifstream(here.file() + ".1").good());
    CHECK(std::ifstream(here.file() + ".2").good());
}

TEST_CASE("a torn last line costs itself and nothing else", "[serving]") {
    support::random any(support::seed(7));
    std::vector<usage_line> lines;
    for (int n = 0; n < 3; ++n) lines.push_back(some_line(any, "chat", at(n * 1h)));
    const auto last = to_text(lines[2]);
    for (const auto kept :
         {std::size_t{0}, std::size_t{1}, last.size() / 2, last.size() - 9, last.size() - 2, last.size() - 1}) {
        CAPTURE(kept);
        const temporary here;
        { usage_journal(here.file()).append(std::span(lines).first(2)); }
        std::ofstream(here.file(), std::ios::app) << last.substr(0, kept);
        std::size_t torn = 0;
        CHECK(lines_of(here.file(), &torn).size() == 2);
        CHECK(torn == (kept == 0 ? 0 : 1));
        // It isn't completed by what comes behind it, not even where only its line feed is missing.
        { usage_journal(here.file()).append(std::span(lines).subspan(2)); }
        CHECK(lines_of(here.file(), &torn) == lines);
        CHECK(torn == (kept == 0 ? 0 : 1));
    }
}

TEST_CASE("a journal's lines may be longer than what is read at once", "[serving]") {
    const temporary here;
    support::random any(support::seed(7));
    std::vector<usage_line> lines;
    for (const std::size_t length : {1U, 65'000U, 65'536U, 3U, 200'000U, 131'072U, 65'500U, 2U})
        lines.push_back({.tenant = std::string(length, static_cast<char>('a' + any.below(26))),
                         .from = wall_time(1s),
                         .until = wall_time(2s)});
    usage_journal(here.file()).append(lines);
    std::size_t torn = 9;
    CHECK((lines_of(here.file(), &torn) == lines));
    CHECK(torn == 0);
    {
        std::ofstream more(here.file(), std::ios::app);  // a file whose last line was never finished
        more << std::string(300'000, 'x');
    }
    CHECK((lines_of(here.file(), &torn) == lines));
    CHECK(torn == 1);
}

TEST_CASE("a journal refuses lines that it couldn't read back, and a second writer", "[serving]") {
    const temporary here;
    usage_journal journal(here.file());
    const usage_line nameless{"", at(0s), at(1s), {}}, empty{"chat", at(1s), at(1s), {}};
    CHECK(journal.try_append({&nameless, 1}).code == errc::invalid_specification);
    CHECK(journal.try_append({&empty, 1}).code == errc::invalid_specification);
    const usage_line ancient{"chat", wall_time::min(), at(1s), {}};
    CHECK(journal.try_append({&ancient, 1}).code == errc::invalid_specification);
    CHECK(support::code_of([&] { usage_journal second(here.file()); }) == errc::in_flight);
    CHECK(support::code_of([&] { usage_journal lost(here / "no/such/usage"); }) == errc::io_failed);
    CHECK(lines_of(here.file()).empty());
    CHECK(lines_of(here / "nothing").empty());
    usage_journal moved = std::move(journal);
    const usage_line good{"chat", at(0s), at(1s), {}};
    moved.append({&good, 1});
    CHECK(lines_of(here.file()).size() == 1);
}

TEST_CASE("a copy beside a journal isn't read as one of its files", "[serving]") {
    const temporary here;
    usage_journal journal(here.file());
    for (int n = 0; n < 2; ++n) {
        const usage_line l{"chat", at(n * 1s), at((n + 1) * 1s), {}};
        journal.append({&l, 1});
        if (n == 0) CHECK(journal.rotate().code == errc::none);
    }
    std::ofstream(here.file() + ".01") << std::ifstream(here.file() + ".1").rdbuf();
    CHECK(lines_of(here.file()).size() == 2);
}

TEST_CASE("a journal that has no descriptor left says so, and goes on once it has", "[serving]") {
    const temporary here;
    usage_journal journal(here.file());
    const usage_line l{"chat", at(0s), at(1s), {}};
    journal.append({&l, 1});
    rlimit was{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &was) == 0);
    const rlimit none{0, was.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    const auto why = journal.rotate();
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &was) == 0);
    CHECK(why.code == errc::io_failed);
    CHECK(why.asked == EMFILE);
    CHECK(journal.rotate().code == errc::none);
    journal.append({&l, 1});
    CHECK(lines_of(here.file()).size() == 2);
}

usage_line nth(int n) { return {"chat", at(n * 1s), at((n + 1) * 1s), {ns{n}, {}, {}, 0, 0}}; }
/// Appends the n-th line; whether that went well.
bool appended(usage_journal& journal, int n) {
    const usage_line l = nth(n);
    return journal.try_append({&l, 1}).code == errc::none;
}
void rename(const std::string& from, const std::string& to) { REQUIRE(std::rename(from.c_str(), to.c_str()) == 0); }

TEST_CASE("a journal that others rotate goes on in a new file, and rotates itself", "[serving]") {
    const temporary here;
    usage_journal journal(here.file(), {.rotate_at = 300_B});
    REQUIRE(appended(journal, 0));
    rename(here.file(), here.file() + ".1");
    for (int n = 1; n < 50; ++n) CHECK(appended(journal, n));
    // The same where it would rotate itself, and where what it finds isn't its own.
    rename(here.file(), here / "elsewhere");
    CHECK(journal.rotate().code == errc::none);
    CHECK(appended(journal, 50));
    rename(here / "elsewhere", here.file() + ".100");
    rename(here.file(), here.file() + ".101");
    { std::ofstream other(here.file()); }
    CHECK(appended(journal, 51));
    std::size_t torn = 0;
    const auto lines = lines_of(here.file(), &torn);
    REQUIRE(lines.size() == 52);
    for (int n = 0; n < 52; ++n) CHECK(std::ranges::find(lines, nth(n)) != lines.end());
    CHECK(torn == 0);
}

TEST_CASE("a rotation overwrites no file, even behind the last number", "[serving]") {
    const temporary here;
    { std::ofstream last(here.file() + ".18446744073709551615"); }
    usage_journal journal(here.file());
    for (int n = 0; n < 4; ++n) {
        CHECK(appended(journal, n));
        CHECK(journal.rotate().code == errc::none);
    }
    CHECK(lines_of(here.file()).size() == 4);
}

TEST_CASE("lines appended to a removed journal are in a new file", "[serving]") {
    const temporary here;
    usage_journal journal(here.file());
    REQUIRE(appended(journal, 0));
    REQUIRE(::unlink(here.file().c_str()) == 0);
    CHECK(appended(journal, 1));
    CHECK(lines_of(here.file()) == std::vector{nth(1)});
    CHECK(support::code_of([&] { usage_journal second(here.file()); }) == errc::in_flight);  // it is this one's
    // Another file takes its place by a rename.
    std::ofstream(here / "other") << to_text(nth(7));
    rename(here / "other", here.file());
    CHECK(appended(journal, 2));
    CHECK(lines_of(here.file()) == std::vector{nth(7), nth(2)});
}

TEST_CASE("a disk that fills up behind a truncation leaves no hole", "[serving]") {
    const temporary here;
    usage_journal journal(here.file());
    const auto length = static_cast<off_t>(to_text(nth(0)).size());
    for (int n = 0; n < 4; ++n) REQUIRE(appended(journal, n));
    REQUIRE(::truncate(here.file().c_str(), 0) == 0);  // by a tool that has copied it
    rlimit was{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &was) == 0);
    const rlimit small{static_cast<rlim_t>(length / 2), was.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    const bool fitted = appended(journal, 4);
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &was) == 0);
    CHECK_FALSE(fitted);
    for (int n = 4; n < 8; ++n) CHECK(appended(journal, n));
    std::size_t torn = 0;
    CHECK(lines_of(here.file(), &torn) == std::vector{nth(4), nth(5), nth(6), nth(7)});
    CHECK(torn == 0);
}

TEST_CASE("a file's limit of size is an error and ends no process", "[serving]") {
    const temporary here;
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        usage_journal journal(here.file());
        const rlimit small{10, RLIM_INFINITY}, large{RLIM_INFINITY, RLIM_INFINITY};
        (void)::signal(SIGXFSZ, SIG_DFL);
        if (::setrlimit(RLIMIT_FSIZE, &small) != 0) ::_exit(2);
        const usage_line l = nth(0);
        const auto full = journal.try_append({&l, 1});
        sigset_t pending;
        if (::sigpending(&pending) != 0 || ::sigismember(&pending, SIGXFSZ) != 0) ::_exit(3);
        if (::setrlimit(RLIMIT_FSIZE, &large) != 0) ::_exit(4);
        ::_exit(full.code == errc::io_failed && full.asked == EFBIG && appended(journal, 0) ? 0 : 1);
    }
    int how = 0;
    REQUIRE(::waitpid(child, &how, 0) == child);
    CHECK(WIFEXITED(how));
    CHECK(WEXITSTATUS(how) == 0);
    CHECK(lines_of(here.file()) == std::vector{nth(0)});
}

TEST_CASE("a line that can't be written keeps no other from the bill", "[serving]") {
    const temporary here;
    usage_journal journal(here.file());
    const usage_line nameless{"", at(0s), at(1s), {}};
    std::vector<usage_line> waiting{nth(0), nameless, nth(1)};
    CHECK(journal.append_from(waiting).code == errc::invalid_specification);
    CHECK(waiting == std::vector{nameless});
    waiting.push_back(nth(2));
    CHECK(journal.append_from(waiting).code == errc::invalid_specification);
    waiting = {nth(3)};
    CHECK(journal.append_from(waiting).code == errc::none);
    CHECK(waiting.empty());
    CHECK(lines_of(here.file()) == std::vector{nth(0), nth(1), nth(2), nth(3)});
    // A clock that isn't set is no reason.
    const usage_line early{"chat", wall_time{-5s}, wall_time{1s}, {1ms, {}, {}, 1, 0}};
    journal.append({&early, 1});
    CHECK(lines_of(here.file()).back() == early);
    // Nothing is taken out where the file can't be written.
    rename(here.file(), here / "other");
    REQUIRE(::mkdir(here.file().c_str(), 0700) == 0);
    waiting = {nth(4), nameless};
    CHECK(journal.append_from(waiting).code == errc::io_failed);
    CHECK(waiting.size() == 2);
    REQUIRE(::rmdir(here.file().c_str()) == 0);
    CHECK(journal.append_from(waiting).code == errc::invalid_specification);
    CHECK(lines_of(here.file()) == std::vector{nth(4)});
}

TEST_CASE("nothing is billed of a line without a length", "[serving]") {
    usage_invoices bill(at(-1s), at(1s));
    usage_line l{"chat", at(0s), at(0s), {1ms, {}, {}, 1, 1}};
    bill.add(l);
    CHECK(bill.of("chat") == usage_amounts{});
    CHECK(part_of(l, at(-1s), at(1s)) == usage_amounts{});
}

// UndefinedBehaviorSanitizer looks on.
TEST_CASE("a line of all time is billed without an overflow", "[serving]") {
    constexpr auto most = gpushare::ns::max();
    const usage_line all{"chat", wall_time{-most}, wall_time{most}, {most, {}, {}, 8, 0}};
    const auto first = part_of(all, all.from, wall_time{}), second = part_of(all, wall_time{}, all.until);
    CHECK(first.requests == 4);
    CHECK(first.device_time + second.device_time == most);
    usage_invoices bill{all.from, all.until};
    bill.add(all);
    bill.add(all);
    CHECK(bill.of("chat").device_time == most);
    CHECK(bill.of("chat").requests == 16);
}

TEST_CASE("a killed process leaves all that it appended", "[serving]") {
    const temporary here;
    std::array<int, 2> told{};
    REQUIRE(::pipe(told.data()) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {  // until it is killed
        usage_journal journal(here.file(), {.rotate_at = 4_KiB});
        for (std::int64_t n = 0;; ++n) {
            const usage_line l{"chat", at(ns{n}), at(ns{n + 1}), {ns{n}, {}, {}, 0, 0}};
            journal.append({&l, 1});
            if (::write(told[1], &n, sizeof n) != sizeof n) ::_exit(1);
        }
    }
    ::close(told[1]);
    std::int64_t acknowledged = -1;
    while (acknowledged < 200 && ::read(told[0], &acknowledged, sizeof acknowledged) == sizeof acknowledged) {
    }
    REQUIRE(::kill(child, SIGKILL) == 0);
    std::int64_t last = acknowledged;
    while (::read(told[0], &last, sizeof last) == sizeof last) acknowledged = last;
    ::close(told[0]);
    int how = 0;
    REQUIRE(::waitpid(child, &how, 0) == child);
    std::size_t torn = 0;
    auto lines = lines_of(here.file(), &torn);
    CHECK(torn <= 1);
    REQUIRE(static_cast<std::int64_t>(lines.size()) > acknowledged);
    for (std::size_t n = 0; n < lines.size(); ++n)
        CHECK(lines[n].amounts.device_time == ns{static_cast<std::int64_t>(n)});
}

}  // namespace usage_test
