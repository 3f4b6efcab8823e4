// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The command line of trace_replay: every option, and one clear line for every mistake.
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "trace_replay/options.hpp"

using trace_replay::options;
using trace_replay::parse_options;
using trace_replay::usage_error;

namespace {

options parse(std::vector<const char*> arguments) { return parse_options(arguments); }

std::string complaint(std::vector<const char*> arguments) {
    try {
        (void)parse_options(arguments);
    } catch (const usage_error& e) {
        return e.what();
    }
    return {};
}

}  // namespace

TEST_CASE("trace_replay options have defaults and take values in both forms", "[examples]") {
    const auto none = parse({});
    CHECK(none.trace.empty());
    CHECK(none.devices == 2);
    CHECK(none.load == 1.5);
    const auto all = parse({"--trace", "a b.csv", "--devices=4", "--memory", "80", "--load=0.5", "--tenants", "3",
                            "--seed", "7", "--seconds=2", "--svg", "out.svg", "--timeline", "out.json"});
    CHECK(all.trace == "a b.csv");
    CHECK(all.devices == 4);
    CHECK(all.memory_gib == 80);
    CHECK(all.load == 0.5);
    CHECK(all.tenants == 3);
    CHECK(all.seed == 7);
    CHECK(all.seconds == 2);
    CHECK(all.svg == "out.svg");
    CHECK(all.timeline == "out.json");
    CHECK(parse({"--devices", "3", "--help"}).help);
    CHECK(trace_replay::help_text().find("--load") != std::string_view::npos);
}

TEST_CASE("trace_replay options that can't be used get one line that names them", "[examples]") {
    CHECK(complaint({"--devices", "-1"}) == "--devices: '-1' is not a number from 1 to 8");
    CHECK(complaint({"--load", "-0.5"}) == "--load: '-0.5' is not a number from 0.1 to 10");
    CHECK(complaint({"--load", "nan"}) == "--load: 'nan' is not a number from 0.1 to 10");
    CHECK(complaint({"--memory", "99999999999999999999"}) ==
          "--memory: '99999999999999999999' is not a number from 1 to 4096");
    CHECK(complaint({"--memory", "8GiB"}) == "--memory: '8GiB' is not a number from 1 to 4096");
    CHECK(complaint({"--seed", "-1"}) == "--seed: '-1' is not a number from 0 to 18446744073709551615");
    CHECK(complaint({"--devices"}) == "--devices: '' is not a number from 1 to 8");
    CHECK(complaint({"--trace"}) == "--trace needs a value; see --help");
    CHECK(complaint({"--trace", ""}) == "--trace needs a value; see --help");
    CHECK(complaint({"--tennants", "3"}) == "unknown option '--tennants'; see --help");
    CHECK(complaint({"trace.csv"}) == "unexpected argument 'trace.csv'; see --help");
    CHECK(complaint({"-x"}) == "unexpected argument '-x'; see --help");
}
