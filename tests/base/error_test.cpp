// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Errors: every code has a text, messages state the figures, and each exception is caught by
// handlers for all of its kinds.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::error;
using gpushare::failure;
using gpushare::memory_error;
using gpushare::operation_error;
using gpushare::raise;
using gpushare::result;

namespace {

constexpr failure over{
    .code = errc::over_quota, .asked = (512_MiB).count(), .left = (37_MiB).count(), .limit = (4096_MiB).count()};

std::string text_of(const failure& f, std::string_view tenant = {}, std::string_view what = {}) {
    try {
        raise(f, tenant, what);
    } catch (const std::exception& e) {
        return e.what();
    }
    return "nothing was thrown";
}

}  // namespace

TEST_CASE("every error code has a text of its own", "[base][error]") {
    std::set<std::string_view> texts;
    for (int code = 0; code <= static_cast<int>(errc::aborted); ++code) {
        CAPTURE(code);
        const auto text = to_string(static_cast<errc>(code));
        CHECK(text != "unknown error");
        CHECK(texts.insert(text).second);
    }
    CHECK(to_string(static_cast<errc>(255)) == "unknown error");
}

TEST_CASE("a memory refusal says who asked for what, and how much is left", "[base][error]") {
    CHECK(text_of(over, "chat") == "tenant 'chat': asked for 512 MiB, 37 MiB of 4 GiB left (over the quota)");
    CHECK(text_of(over, "chat", "allocate") ==
          "tenant 'chat': allocate: asked for 512 MiB, 37 MiB of 4 GiB left (over the quota)");
    CHECK(text_of(over) == "asked for 512 MiB, 37 MiB of 4 GiB left (over the quota)");
    CHECK(text_of({errc::out_of_memory, 1, 0, 3 << 10}, "chat") ==
          "tenant 'chat': asked for 1 B, 0 B of 3 KiB left (out of device memory)");
}

TEST_CASE("sizes in messages are exact, or have the bytes beside the rounded figure", "[base][error]") {
    const auto asked = [](std::uint64_t n) {
        const auto text = text_of({.code = errc::over_quota, .asked = n, .because = gpushare::reason::size});
        constexpr std::size_t begin = std::string_view("asked for ").size();
        return text.substr(begin, text.find(" (over the quota)") - begin);
    };
    CHECK(asked(0) == "0 B");
    CHECK(asked(1023) == "1023 B");
    CHECK(asked(1536 << 20) == "1536 MiB");
    CHECK(asked((2_TiB).count()) == "2048 GiB");
    CHECK(asked(10'239) == "10239 B");
    CHECK(asked(10'241) == "10241 B (0.0 MiB)");
    CHECK(asked((100_MiB).count() + 1) == "104857601 B (100.0 MiB)");
    CHECK(asked(~std::uint64_t{0}) == "18446744073709551615 B (17592186044416.0 MiB)");
}

TEST_CASE("every reason has a sentence and its figures' unit", "[base][error]") {
    using gpushare::figure_unit, gpushare::unit_of;
    using gpushare::reason;
    CHECK(text_of({.code = errc::bad_alignment, .asked = 3, .because = reason::no_power_of_two}, "chat") ==
          "tenant 'chat': alignment 3 is not a power of two");
    CHECK(text_of({errc::out_of_memory, (20_MiB).count(), (4_MiB).count(), (24_MiB).count(), reason::largest_block}) ==
          "asked for 20 MiB in one block, but the largest free block has 4 MiB, of 24 MiB free in all (out of device "
          "memory)");
    CHECK(text_of({errc::share_exceeded, 501, 125, 1000}) ==
          "asked for 50.1 % of the device's time, 12.5 % of 100 % left (shares would exceed the whole device)");
    CHECK(text_of({.code = errc::io_failed, .asked = ENOENT}) ==
          "a file could not be read or written: No such file or directory (errno 2)");
    CHECK(unit_of({.code = errc::over_quota, .asked = 1}) == figure_unit::bytes);
    CHECK(unit_of({.code = errc::slo_unreachable, .limit = 1}) == figure_unit::nanoseconds);
    CHECK(unit_of({.code = errc::io_failed, .asked = 1}) == figure_unit::error_number);
    // Numbers whose unit nobody says are shown to nobody.
    CHECK(text_of({errc::invalid_specification, 4, 0, 1}) == "invalid specification");
    CHECK(unit_of({errc::invalid_specification, 4, 0, 1}) == figure_unit::none);
    // A number that is no reason.
    CHECK(text_of({.code = errc::closed, .because = static_cast<reason>(60'000)}) == "closed");
}

namespace {

/// What each code and each reason says, as somebody reads it, of figures that are different from
/// each other.
std::string all_errors() {
    using gpushare::detail::sentences;
    std::string all;
    for (int c = 1; c <= static_cast<int>(errc::aborted); ++c)
        all += "code " + std::to_string(c) + ": " + text_of({.code = static_cast<errc>(c)}) + '\n';
    for (const auto& s : sentences) {
        failure f{.code = s.code, .asked = 5, .left = 3, .limit = 4, .because = s.of};
        if (s.unit == gpushare::figure_unit::bytes) f = {s.code, 5 << 20, 3 << 20, 4 << 20, s.of};
        if (s.unit == gpushare::figure_unit::permille) f = {s.code, 501, 300, 1000, s.of};
        if (s.unit == gpushare::figure_unit::nanoseconds) f = {s.code, 20'000'000, 0, 76'500'000, s.of};
        if (f.code == errc::none)
            f.code = s.unit == gpushare::figure_unit::bytes ? errc::out_of_memory : errc::invalid_specification;
        if (s.of != gpushare::reason::unsaid) all += text_of(f, "chat") + '\n';
    }
    return all;
}

}  // namespace

TEST_CASE("all errors are as they were read last", "[base][error]") {
    // Whoever changes a sentence, or adds one, reads the list and takes it over.
    std::ifstream file(GPUSHARE_TESTS "/base/errors.txt");
    const std::string read{std::istreambuf_iterator<char>(file), {}};
    const auto now = all_errors();
    INFO(now);
    CHECK(now == read);
    // Each reason says something else, and no figure is left unnamed in braces.
    CHECK(now.find('{') == std::string::npos);
    std::set<std::string> lines;
    std::istringstream in(now);
    for (std::string line; std::getline(in, line);) CHECK(lines.insert(line).second);
}

TEST_CASE("durations in messages have the largest unit that fits, and three digits behind the point", "[base][error]") {
    const auto text = [](gpushare::ns t) { return std::string(gpushare::detail::message().add(t).c_str()); };
    CHECK(text(0ns) == "0 ns");
    CHECK(text(999ns) == "999 ns");
    CHECK(text(1us) == "1 us");
    CHECK(text(20ms) == "20 ms");
    CHECK(text(75'999us) == "75.999 ms");
    CHECK(text(1500ms) == "1.5 s");
    CHECK(text(1'050'000'001ns) == "1.05 s");
    CHECK(text(2h) == "7200 s");
    CHECK(text(-250us) == "-250 us");
    CHECK(text(gpushare::ns::min()) == "-9223372036.854 s");
}

TEST_CASE("unprintable characters are escaped, in names and in texts", "[base][error]") {
    using namespace std::string_view_literals;
    const auto name = [](std::string_view text) { return std::string(gpushare::tenant_name{text}.view()); };
    CHECK(name("\x1b[31m") == "\\x1b[31m");
    CHECK(name("x\0y"sv) == "x\\x00y");
    CHECK(name("line\nbreak\x7f") == "line\\x0abreak\\x7f");
    CHECK(name("Größe-模型-🚀") == "Größe-模型-🚀");
    CHECK(name("\xff\xfe") == "\\xff\\xfe");
    CHECK(name("\xc2\x9b"
               "31m") == "\\xc2\\x9b31m");  // a terminal takes this for ESC [
    CHECK(name("\xc0\xaf\xe0\x80\xaf\xed\xa0\x80\xf4\x90\x80\x80").find('\xaf') == std::string::npos);  // no UTF-8
    CHECK(name("\xe6\xa8") == "\\xe6\\xa8");  // the beginning of a character
    // Marks that show nothing, and make text read as another one: by their last and first code
    // points, and next to them.
    CHECK(name("a\u200fb\u202etxt.exe") == "a\\xe2\\x80\\x8fb\\xe2\\x80\\xaetxt.exe");
    for (const std::string_view mark :
         {"\u061c", "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202e", "\u2066", "\u2069", "\ufeff"}) {
        CHECK(name(mark).size() == 4 * mark.size());
        CHECK(text_of(over, mark).find(mark) == std::string::npos);
    }
    for (const std::string_view text : {"\u061b", "\u200d", "\u2010", "\u2027", "\u202f", "\u2065", "\u206a", "\ufefe"})
        CHECK(name(text) == text);
    // Cut between characters, never within one or within an escape.
    CHECK(name(std::string(62, 'x') + "ö").size() == 62);
    CHECK(name(std::string(60, 'x') + "\x1b").size() == 60);
    CHECK(name(std::string(59, 'x') + "\x1b").size() == 63);
    // The same in every text of an error.
    CHECK(text_of(over, "a\nb\0c"sv, "al\x1blocate")
              .starts_with("tenant 'a\\x0ab\\x00c': al\\x1blocate: asked for 512 MiB"));
    CHECK(std::string_view(operation_error(errc::closed, {}, "a\tb").what()) == "a\\x09b");
}

TEST_CASE("no message is empty", "[base][error]") {
    CHECK(std::string_view(operation_error(errc::closed, {}, "").what()) == "closed");
    CHECK(std::string_view(operation_error({.code = errc::closed}, "a", gpushare::detail::message{}).what()) ==
          "tenant 'a': closed");
    CHECK(
        std::string_view(memory_error(over, {}, gpushare::detail::message{}).what()).starts_with("asked for 512 MiB"));
}

TEST_CASE("a memory refusal is a std::bad_alloc, a std::exception and a gpushare::error", "[base][error]") {
    CHECK_THROWS_AS(raise(over, "chat"), std::bad_alloc);
    CHECK_THROWS_AS(raise(over, "chat"), std::exception);
    CHECK_THROWS_AS(raise(over, "chat"), error);
    for (const auto code : {errc::over_quota, errc::out_of_memory, errc::size_overflow, errc::bad_alignment})
        CHECK_THROWS_AS(raise({.code = code}), memory_error);
    try {
        raise(over, "chat", "allocate");
    } catch (const error& e) {
        CHECK(e.code() == errc::over_quota);
        CHECK(e.tenant() == "chat");
        CHECK(e.figures().asked == over.asked);
        CHECK(e.figures().left == over.left);
        CHECK(e.figures().limit == over.limit);
        CHECK(std::string_view(e.what()).starts_with("tenant 'chat': allocate: asked for 512 MiB"));
    }
}

TEST_CASE("every other failure is a std::runtime_error, a std::exception and a gpushare::error", "[base][error]") {
    const failure full{errc::queue_full, 1, 0, 64};
    CHECK_THROWS_AS(raise(full, "chat"), std::runtime_error);
    CHECK_THROWS_AS(raise(full, "chat"), std::exception);
    CHECK_THROWS_AS(raise(full, "chat"), error);
    CHECK_THROWS_AS(raise(full, "chat"), operation_error);
    CHECK(text_of(full, "chat", "submit") ==
          "tenant 'chat': submit: queue is full: 64 submissions wait already, the most allowed");
    CHECK(text_of({.code = errc::closed}, "chat") == "tenant 'chat': closed");
    CHECK(text_of({errc::no_room, 2048, 1024, 4096}) ==
          "asked for 2 KiB, 1 KiB of 4 KiB left (not enough unpromised memory)");

    const operation_error own(errc::not_whole, "chat", "a text of its own");
    CHECK(std::string_view(own.what()) == "a text of its own");
    CHECK(own.code() == errc::not_whole);
    CHECK(own.tenant() == "chat");
}

TEST_CASE("a long tenant name is cut, the figures are not", "[base][error]") {
    const std::string name(1000, 'x');
    const auto text = text_of(over, name);
    CHECK(text.find("asked for 512 MiB, 37 MiB of 4 GiB left (over the quota)") != std::string::npos);
    CHECK(memory_error(over, name, {}).tenant() == std::string(63, 'x'));
    CHECK(operation_error({.code = errc::closed}, name, {}).tenant() == std::string(63, 'x'));
    CHECK(memory_error(over, std::string(63, 'y'), {}).tenant().size() == 63);
}

TEST_CASE("a message that is too long is cut and still ends", "[base][error]") {
    const std::string what(10'000, 'w');
    const auto text = text_of(over, "chat", what);
    CHECK(text.size() < 400);
    CHECK(text.starts_with("tenant 'chat': www"));
    // Each length at which a figure meets the end of the buffer.
    for (std::size_t length = 200; length < 330; ++length)
        REQUIRE(text_of(over, {}, std::string_view(what).substr(0, length)).size() < 400);
}

TEST_CASE("copies of an exception own their text", "[base][error]") {
    auto first = std::make_unique<memory_error>(over, std::string("chat"), std::string("allocate"));
    const std::string text = first->what();
    const memory_error copy = *first;
    first.reset();
    CHECK(copy.what() == text);
    CHECK(copy.tenant() == "chat");
    static_assert(std::is_nothrow_copy_constructible_v<memory_error>);
}

TEST_CASE("a result holds a value or the reason why there is none", "[base][error]") {
    result<std::vector<int>> good(std::vector{1, 2});
    REQUIRE(good);
    CHECK(good->size() == 2);
    CHECK(good.code() == errc::none);
    CHECK(std::move(good).value() == std::vector{1, 2});

    const result<int> bad(over);
    REQUIRE_FALSE(bad);
    CHECK(bad.code() == errc::over_quota);
    CHECK(bad.why().asked == over.asked);
    CHECK(result<int>(errc::closed).code() == errc::closed);
    CHECK_THROWS_AS(result<int>(over).value("chat"), std::bad_alloc);
    CHECK_THROWS_WITH(result<int>(errc::closed).value("chat", "submit"), "tenant 'chat': submit: closed");

    result<std::unique_ptr<int>> moved(std::make_unique<int>(3));
    CHECK(*std::move(moved).value() == 3);
}
