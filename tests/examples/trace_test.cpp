// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Reading traces: which lines are kept, which are skipped and named, and which are errors.
#include "trace_replay/trace.hpp"

#include <algorithm>
#include <clocale>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/catch.hpp"

using trace_replay::read_trace;
using trace_replay::request;
using trace_replay::trace;
using trace_replay::trace_error;

namespace {

const std::string header =
    "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,prompt_length,negative_prompt_length,"
    "num_images_per_prompt,num_inference_steps,checkpoint_model_version_id,num_lora\n";
const std::string good_row = "2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.0,G0000,63.0,26.0,1.0,30.0,M0000,0";

trace parse(const std::string& text) {
    std::istringstream in(text);
    return read_trace(in, "t.csv");
}

/// A good row with one column replaced; columns count from 0.
std::string row_with(std::size_t column, std::string_view value) {
    std::string out;
    std::istringstream cells(good_row);
    std::string cell;
    for (std::size_t i = 0; std::getline(cells, cell, ','); ++i) {
        if (i != 0) out += ',';
        out += i == column ? std::string(value) : cell;
    }
    return out;
}

/// Why the only row of a trace was skipped; empty if it wasn't.
std::string reason_of(const std::string& row) {
    const trace t = parse(header + row + "\n");
    REQUIRE(t.summary.rows == 1);
    REQUIRE(t.summary.kept + t.summary.skipped.size() == 1);
    return t.summary.skipped.empty() ? "" : t.summary.skipped.front().reason;
}

}  // namespace

TEST_CASE("a row becomes a request", "[examples][trace]") {
    const trace t = parse(header + "2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.5,G0000,63.0,26.0,1.0,30.0,M0007,2\n");
    REQUIRE(t.requests.size() == 1);
    CHECK(t.requests[0] == request{0, "G0000", "M0007", 30, 2, 32.5});
    CHECK(t.start.time_since_epoch().count() == 1731689870);
    CHECK(to_string(t.summary) == "1 of 1 rows kept");
}

TEST_CASE("requests come by arrival, equal ones in the file's order", "[examples][trace]") {
    const trace t =
        parse(header + "2024-12-01 00:00:01,,SUCCEED,1,late,,,,30,M,0\n" +
              "2024-11-30 23:59:59,,SUCCEED,1,early,,,,30,M,0\n" + "2024-12-01 00:00:01,,SUCCEED,1,later,,,,30,M,0\n");
    REQUIRE(t.requests.size() == 3);
    CHECK(t.requests[0].group == "early");
    CHECK(t.requests[1].group == "late");
    CHECK(t.requests[2].group == "later");
    CHECK(t.requests[0].arrival_s == 0);
    CHECK(t.requests[2].arrival_s == 2);
}

TEST_CASE("columns are found by name, in any order, beside others", "[examples][trace]") {
    const trace t = parse(
        "num_lora,extra,groupId,checkpoint_model_version_id,num_inference_steps,exec_time_seconds,predict_status,"
        "gmt_create\n1,x,g,m,20,3,SUCCEED,2024-01-01 00:00:00\n");
    REQUIRE(t.requests.size() == 1);
    CHECK(t.requests[0] == request{0, "g", "m", 20, 1, 3});
}

TEST_CASE("rows that can't be used are counted and named", "[examples][trace]") {
    CHECK(reason_of(row_with(2, "FAILED")) == "status FAILED");
    CHECK(reason_of(row_with(2, "PENDING")) == "status PENDING");
    CHECK(reason_of(row_with(2, "")) == "empty predict_status");
    CHECK(reason_of(row_with(2, "what <is> this")) == "unknown status");
    CHECK(reason_of(row_with(3, "")) == "empty exec_time_seconds");
    CHECK(reason_of(row_with(4, "")) == "empty groupId");
    CHECK(reason_of(row_with(8, "")) == "empty num_inference_steps");
    CHECK(reason_of(row_with(9, "")) == "empty checkpoint_model_version_id");
    CHECK(reason_of(row_with(10, "")) == "empty num_lora");
    CHECK(reason_of(row_with(3, "0.0")) == "zero exec_time_seconds");
    CHECK(reason_of(row_with(3, "-0.0")) == "zero exec_time_seconds");
    CHECK(reason_of(row_with(8, "0")) == "zero num_inference_steps");
    CHECK(reason_of(row_with(8, "30.5")) == "not a whole number: num_inference_steps");
    CHECK(reason_of(row_with(3, "1e300")) == "too large: exec_time_seconds");
    CHECK(reason_of(row_with(8, "4294967297")) == "too large: num_inference_steps");
    for (const char* text : {"1e999", "nan", "inf", "abc", "1,5", "0x10", "1.2.3", " 1", "1 ", "+1", "--1", "1e"}) {
        INFO(text);
        CHECK(reason_of(row_with(3, '"' + std::string(text) + '"')) == "not a number: exec_time_seconds");
    }
    CHECK(reason_of(good_row + ",1") == "wrong number of fields");
    CHECK(reason_of("x") == "wrong number of fields");
    CHECK(reason_of(row_with(4, "\"G")) == "stray quote");
    CHECK(reason_of(row_with(4, "a\"b\"")) == "stray quote");
    CHECK(reason_of(row_with(4, "\"a\"b")) == "stray quote");
    CHECK(reason_of(row_with(4, std::string_view("a\0b", 3))) == "control character");
    CHECK(reason_of(row_with(4, "\x1B[31m")) == "control character");
    CHECK(reason_of(row_with(4, std::string(1 << 20, 'x'))) == "line too long");
}

TEST_CASE("times are checked against the calendar", "[examples][trace]") {
    for (const char* time : {"2024-02-29 00:00:00", "2000-02-29 23:59:59", "1970-01-01 00:00:00"}) {
        INFO(time);
        CHECK(reason_of(row_with(0, time)).empty());
    }
    for (const char* time :
         {"", "2023-02-29 00:00:00", "1900-02-29 00:00:00", "2024-04-31 00:00:00", "2024-00-01 00:00:00",
          "2024-13-01 00:00:00", "2024-01-00 00:00:00", "2024-01-01 24:00:00", "2024-01-01 00:60:00",
          "2024-01-01 00:00:60", "2024-1-01 00:00:00", "2024-01-01T00:00:00", "2024-01-01 00:00:00 ",
          "2024-01-01 00:00", "-024-01-01 00:00:00", "2024-01-01 00:00:0x"}) {
        INFO(time);
        CHECK(reason_of(row_with(0, time)) == "bad time");
    }
}

TEST_CASE("the summary names reasons, the commonest first", "[examples][trace]") {
    const trace t = parse(header + row_with(2, "PENDING") + "\n" + row_with(2, "FAILED") + "\n" + good_row + "\n\n" +
                          row_with(2, "FAILED") + "\n");
    CHECK(to_string(t.summary) ==
          "1 of 4 rows kept; skipped: 2 status FAILED (first in line 3), 1 status PENDING (first in line 2)");
}

TEST_CASE("a file full of different statuses doesn't make a summary without end", "[examples][trace]") {
    std::string text = header;
    for (char a = 'A'; a <= 'Z'; ++a) {
        for (char b = 'A'; b <= 'Z'; ++b) text += row_with(2, std::string{a, b}) + "\n";
    }
    const trace t = parse(text);
    CHECK(t.summary.skipped.size() <= 41);
    CHECK(t.summary.skipped.front().reason == "other reasons");
    std::size_t rows = 0;
    for (const auto& s : t.summary.skipped) rows += s.rows;
    CHECK(rows == 26 * 26);
}

TEST_CASE("line ends, byte order mark, quotes and a missing last line break don't matter", "[examples][trace]") {
    const auto expected = parse(header + good_row + "\n" + good_row + "\n").requests;
    REQUIRE(expected.size() == 2);
    const std::string crlf_header = header.substr(0, header.size() - 1) + "\r\n";
    CHECK(parse(crlf_header + good_row + "\r\n" + good_row + "\r\n").requests == expected);
    CHECK(parse("\xEF\xBB\xBF" + header + good_row + "\n" + good_row).requests == expected);
    CHECK(parse(header + good_row + "\n\n\r\n" + good_row + "\n\n").requests == expected);
    CHECK(parse(header + row_with(4, "\"G0000\"") + "\n" + good_row).requests == expected);
    CHECK(parse(header + row_with(4, "\"a,\"\"b\"\"\"")).requests.at(0).group == "a,\"b\"");
}

TEST_CASE("a file that isn't a trace is refused in one clear line", "[examples][trace]") {
    CHECK_THROWS_WITH(parse(""), "t.csv: the file is empty");
    CHECK_THROWS_WITH(parse("\n"), "t.csv: line 1: no column 'gmt_create' in the header");
    CHECK_THROWS_WITH(parse("gmt_create,predict_status\n"),
                      "t.csv: line 1: no column 'exec_time_seconds' in the header");
    CHECK_THROWS_WITH(parse("groupId," + header), "t.csv: line 1: two columns 'groupId'");
    CHECK_THROWS_WITH(parse("\"" + header), "t.csv: line 1: a stray quote in the header");
    CHECK_THROWS_WITH(parse(std::string(1 << 20, 'x')), "t.csv: line 1: too long for a header");
    CHECK_THROWS_WITH(parse(header + good_row + "\n" + row_with(3, "-3.0")),
                      "t.csv: line 3: negative exec_time_seconds '-3.0'");
    CHECK_THROWS_WITH(parse(header + row_with(8, "-1")), "t.csv: line 2: negative num_inference_steps '-1'");
    // In a row that would be skipped anyway, too.
    CHECK_THROWS_WITH(parse(header + "x,,FAILED,1,,,,,1,,-2"), "t.csv: line 2: negative num_lora '-2'");
    CHECK_THROWS_AS(trace_replay::read_trace_file("/nonexistent/trace.csv"), trace_error);
    CHECK_THROWS_WITH(trace_replay::read_trace_file("/nonexistent/trace.csv"),
                      "/nonexistent/trace.csv: No such file or directory");
    CHECK_THROWS_WITH(trace_replay::read_trace_file("/"), "/: cannot be read");
}

TEST_CASE("a header alone is an empty trace", "[examples][trace]") {
    for (const std::string& text : {header, header.substr(0, header.size() - 1)}) {
        const trace t = parse(text);
        CHECK(t.requests.empty());
        CHECK(to_string(t.summary) == "0 of 0 rows kept");
    }
}

TEST_CASE("a written trace is read back", "[examples][trace]") {
    trace t;
    t.start = std::chrono::sys_days{std::chrono::year{2024} / 2 / 28} + std::chrono::hours{23};
    t.requests = {{0, "plain", "M", 30, 0, 32},
                  {3600, "a,b", "say \"M\"", 1, 6, 0.1},
                  {90000, "z", "M", 1000000, 1000000, 1e6 - 1e-9},
                  {90000, "\xC3\xA9", "M", 5, 1, 1e-300}};
    std::stringstream file;
    write_csv(file, t);
    const trace back = read_trace(file, "copy");
    CHECK(back.requests == t.requests);
    CHECK(back.start == t.start);
    CHECK(back.summary.kept == 4);
}

TEST_CASE("damaged files never do worse than a trace_error", "[examples][trace][property]") {
    const std::string whole =
        header + good_row + "\n" + row_with(4, "\"a,\"\"b\"") + "\n" + row_with(2, "FAILED") + "\n";
    const std::string_view pieces = ",\"\n\r-.0e9:\xEF\xFF ";
    for (unsigned seed = 0; seed < 3000; ++seed) {
        CAPTURE(seed);
        std::minstd_rand random(seed + 1);
        std::string text = whole;
        for (auto n = random() % 6; n > 0; --n) {
            const auto at = random() % text.size();
            const char c = random() % 4 == 0 ? '\0' : pieces[random() % pieces.size()];
            if (random() % 3 == 0)
                text.erase(at, random() % 9 + 1);
            else if (random() % 2 == 0)
                text[at] = c;
            else
                text.insert(at, 1, c);
            if (text.empty()) text = ",";
        }
        try {
            const trace t = parse(text);
            std::size_t skipped = 0;
            for (const auto& s : t.summary.skipped) skipped += s.rows;
            CHECK(t.summary.kept + skipped == t.summary.rows);
            CHECK(t.requests.size() == t.summary.kept);
        } catch (const trace_error& e) {
            CHECK(std::string_view(e.what()).starts_with("t.csv: "));
        }
    }
}

TEST_CASE("the published trace is read whole", "[examples][trace]") {
#if defined(GPUSHARE_SHARED_DATA)
    const std::string path = GPUSHARE_SHARED_DATA "/lora_request_trace.csv";
    if (std::ifstream(path).good()) {
        const trace t = trace_replay::read_trace_file(path);
        CHECK(t.summary.rows == 26823);
        CHECK(t.summary.kept == 26392);
        REQUIRE(t.summary.skipped.size() == 3);
        CHECK(t.summary.skipped[0].reason == "status FAILED");
        CHECK(t.summary.skipped[0].rows == 398);
        CHECK(t.summary.skipped[1].rows == 30);
        CHECK(t.summary.skipped[2].rows == 3);
        return;
    }
#endif
    WARN("the published trace isn't here: not checked");
}
