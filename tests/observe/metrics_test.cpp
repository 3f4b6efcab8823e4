// SPDX-License-Identifier: Apache-2.0
// Metrics as text: the rules of the format, for any input, and the names that dashboards know.
#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/observe/metrics.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace metrics_test {
namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::metric_type;
using gpushare::metrics_text;

template <class F>
std::string written(F f, std::size_t room = 65536) {
    std::vector<char> page(room);
    metrics_text out{page};
    f(out);
    return std::string(out.text());
}

/// What is wrong with a text in the format; empty if nothing is. As `promtool check metrics` sees
/// it, for names and labels too.
std::string fault_of(std::string_view text) {
    std::string_view family, type;
    std::vector<std::string_view> families;
    const auto name_length = [](std::string_view s, bool colons) {
        std::size_t n = 0;
        while (n < s.size() && (std::isalpha(static_cast<unsigned char>(s[n])) != 0 || s[n] == '_' ||
                                (s[n] == ':' && colons) || (n != 0 && s[n] >= '0' && s[n] <= '9')))
            ++n;
        return n;
    };
    while (!text.empty()) {
        const auto end = text.find('\n');
        if (end == std::string_view::npos) return "no line feed at the end";
        std::string_view line = text.substr(0, end);
        const std::string whole(line);
        text.remove_prefix(end + 1);
        if (line.starts_with("# HELP ") || line.starts_with("# TYPE ")) {
            const bool is_type = line[2] == 'T';
            line.remove_prefix(7);
            const auto n = name_length(line, true);
            if (n == 0 || n >= line.size() || line[n] != ' ') return "name: " + whole;
            if (!is_type) {
                family = line.substr(0, n);
                for (const auto f : families)
                    if (f == family) return "twice: " + whole;
                families.push_back(family);
            } else if (line.substr(0, n) != family) {
                return "type of another: " + whole;
            } else {
                type = line.substr(n + 1);
                if ((type == "counter") != family.ends_with("_total")) return "suffix: " + whole;
            }
            continue;
        }
        const auto n = name_length(line, true);
        std::string_view name = line.substr(0, n);
        if (type == "histogram") {
            const std::string_view of = name;
            for (const std::string_view suffix : {"_bucket", "_sum", "_count"})
                if (of.ends_with(suffix)) name = of.substr(0, of.size() - suffix.size());
            if (name.size() == of.size()) return "no suffix of a histogram: " + whole;
            if (of.ends_with("_bucket") != (line.find("le=\"") != std::string_view::npos)) return "le: " + whole;
        }
        if (name != family) return "sample of another family: " + whole;
        line.remove_prefix(n);
        if (line.starts_with('{')) {
            do {
                line.remove_prefix(1);
                const auto m = name_length(line, false);
                if (m == 0 || !line.substr(m).starts_with("=\"")) return "label: " + whole;
                line.remove_prefix(m + 2);
                for (; !line.starts_with('"'); line.remove_prefix(line.starts_with('\\') ? 2 : 1)) {
                    if (line.size() < 2) return "open: " + whole;
                    if (line[0] == '\\' && line[1] != '\\' && line[1] != '"' && line[1] != 'n')
                        return "escape: " + whole;
                    const auto length = gpushare::detail::utf8_length(line);
                    if (length == 0) return "no UTF-8: " + whole;
                    line.remove_prefix(line[0] == '\\' ? 0 : length - 1);
                }
                line.remove_prefix(1);
            } while (line.starts_with(','));
            if (!line.starts_with('}')) return "labels: " + whole;
            line.remove_prefix(1);
        }
        if (!line.starts_with(' ') || line.size() < 2) return "value: " + whole;
        const std::string value(line.substr(1));
        char* stop = nullptr;
        (void)std::strtod(value.c_str(), &stop);
        if (*stop != '\0') return "value: " + whole;
    }
    return {};
}

}  // namespace

TEST_CASE("metrics are written as the format has them", "[observe]") {
    CHECK(
        written([](metrics_text& out) {
            out.family("requests_total", metric_type::counter, "Answers, \"all\" of\nthem \\o/.");
            out.sample({{"tenant", "a\"b\\c\nd"}, {"model", ""}, {"zone", "x"}}, 7U);
            out.sample({}, -3);
            out.family("load", metric_type::gauge, "Of it.");
            out.sample({}, 0.5);
            out.sample({}, std::numeric_limits<double>::infinity());
            out.sample({}, std::numeric_limits<double>::quiet_NaN());
            out.sample({}, 1234567890123ns);
            out.sample({}, -5ms);
            out.sample({}, 2s);
            out.sample({}, gpushare::bytes::max());
            out.family("latency_seconds", metric_type::histogram, "Of answers.");
            out.sample({{"le", "+Inf"}}, 3, "_bucket");
            out.sample({}, 3, "_count");
        }) ==
        "# HELP requests_total Answers, \"all\" of\\nthem \\\\o/.\n# TYPE requests_total counter\n"
        "requests_total{tenant=\"a\\\"b\\\\c\\nd\",zone=\"x\"} 7\nrequests_total -3\n"
        "# HELP load Of it.\n# TYPE load gauge\nload 0.5\nload +Inf\nload NaN\nload 1234.567890123\nload -0.005000000\n"
        "load 2\nload 18446744073709551615\n"
        "# HELP latency_seconds Of answers.\n# TYPE latency_seconds histogram\nlatency_seconds_bucket{le=\"+Inf\"} 3\n"
        "latency_seconds_count 3\n");
}

TEST_CASE("names that the format doesn't have, and labels of any bytes, come out valid", "[observe]") {
    CHECK(written([](metrics_text& out) {
              out.family("9 lives:x", metric_type::gauge, "");
              out.sample({{"a-b:c", "\xff\xc3(\xe2\x82\xac\xed\xa0\x80"}}, 1);
          }) ==
          "# HELP __lives:x \n# TYPE __lives:x gauge\n"
          "__lives:x{a_b_c=\"\xef\xbf\xbd\xef\xbf\xbd(\xe2\x82\xac\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"} 1\n");
    // What a terminal would act on comes out as text.
    CHECK(written([](metrics_text& out) {
              out.family("x", metric_type::gauge, "");
              out.sample({{"tenant", std::string_view("\x1b[31m\0\x7f\xc2\x9b", 9)}}, 1);
          }) == "# HELP x \n# TYPE x gauge\nx{tenant=\"\\\\x1b[31m\\\\x00\\\\x7f\\\\xc2\\\\x9b\"} 1\n");
    // So does what makes text read as another one.
    CHECK(written([](metrics_text& out) {
              out.family("x", metric_type::gauge, "");
              out.sample({{"tenant", "a\u202eb\u2028\ufeff"}}, 1);
          }) ==
          "# HELP x \n# TYPE x gauge\n"
          "x{tenant=\"a\\\\xe2\\\\x80\\\\xaeb\\\\xe2\\\\x80\\\\xa8\\\\xef\\\\xbb\\\\xbf\"} 1\n");
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any(seed);
    for (int round = 0; round < 2000; ++round) {
        std::string value, help;
        for (auto n = 1 + any.below(20); n != 0; --n) value += static_cast<char>(any.below(256));
        for (auto n = any.below(20); n != 0; --n) help += static_cast<char>(any.below(256));
        const auto text = written([&](metrics_text& out) {
            out.family("x", metric_type::gauge, help);
            out.sample({{"tenant", value}}, any.below(1000));
        });
        CHECK(fault_of(text) == "");
    }
}

TEST_CASE("a page that is too small has whole lines, and says what it lacks", "[observe]") {
    const auto write = [](metrics_text& out) {
        out.family("x", metric_type::gauge, "y");
        for (int i = 0; i < 3; ++i) out.sample({{"tenant", "chat"}}, i);
    };
    const auto all = written(write);
    for (std::size_t room = 0; room <= all.size(); ++room) {
        std::vector<char> page(room + 1, '?');
        metrics_text out{std::span(page).first(room)};
        write(out);
        CHECK(out.size() == all.size());
        CHECK(out.fits() == (room == all.size()));
        CHECK(page.back() == '?');
        CHECK(all.starts_with(out.text()));
        CHECK((out.text().empty() || out.text().ends_with('\n')));
        CHECK(fault_of(out.text()) == "");
    }
}

TEST_CASE("durations are counted in buckets, each up to its limit", "[observe]") {
    gpushare::duration_histogram h, more;
    h.add(gpushare::ns{0});
    h.add(gpushare::duration_histogram::limits[0]);
    h.add(gpushare::duration_histogram::limits[0] + gpushare::ns{1}, 3);
    h.add(gpushare::ns::max());
    more.add(gpushare::ns::max());
    h += more;
    CHECK(h.counts()[0] == 2);
    CHECK(h.counts()[1] == 3);
    CHECK(h.counts().back() == 2);
    CHECK(h.count() == 7);
    CHECK(h.sum() == gpushare::ns::max());
    CHECK(std::ranges::is_sorted(gpushare::duration_histogram::limits));
}

TEST_CASE("devices are named as dcgm-exporter names them, and tenants beside them", "[observe]") {
    gpushare::host::node node{{.devices = 2, .memory = 64_MiB, .sms = 1}};
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat \"1\"", .memory = 16_MiB, .devices = 2, .compute = 50_pct, .level = {1}});
    void* const p = chat.memory(1).allocate(4 << 20);
    chat.submit([](auto&) {}).wait();
    const std::array devices{
        gpushare::device_metrics{.device = {0},
                                 .uuid = "GPU-1",
                                 .capacity = 64_MiB,
                                 .used = 3_MiB,
                                 .busy_percent = 12.5,
                                 .set_aside = 1_MiB},
        gpushare::device_metrics{
            .device = {10}, .uuid = "GPU-2", .pci_bus_id = "00000000:3B:00.0", .host = "node7", .capacity = 64_MiB}};
    const std::array tenants{gpushare::tenant_metrics{chat.name(), chat.usage()},
                             gpushare::tenant_metrics{"other", {}}};
    const auto text = written([&](metrics_text& out) {
        write_device_metrics(out, std::span<const gpushare::device_metrics>(devices));
        write_tenant_metrics(out, std::span<const gpushare::tenant_metrics>(tenants));
    });
    CHECK(fault_of(text) == "");
    for (const char* line : {"DCGM_FI_DEV_FB_USED{gpu=\"0\",UUID=\"GPU-1\",device=\"nvidia0\"} 2\n",
                             "DCGM_FI_DEV_FB_FREE{gpu=\"0\",UUID=\"GPU-1\",device=\"nvidia0\"} 61\n",
                             "DCGM_FI_DEV_FB_RESERVED{gpu=\"0\",UUID=\"GPU-1\",device=\"nvidia0\"} 1\n",
                             "DCGM_FI_DEV_GPU_UTIL{gpu=\"0\",UUID=\"GPU-1\",device=\"nvidia0\"} 12.5\n",
                             "DCGM_FI_DEV_FB_FREE{gpu=\"10\",UUID=\"GPU-2\",pci_bus_id=\"00000000:3B:00.0\","
                             "device=\"nvidia10\",Hostname=\"node7\"} 64\n",
                             "gpushare_tenant_memory_guaranteed_bytes{tenant=\"chat \\\"1\\\"\"} 16777216\n",
                             "gpushare_tenant_submissions_total{tenant=\"chat \\\"1\\\"\",result=\"done\"} 1\n",
                             "gpushare_tenant_allocations_total{tenant=\"other\"} 0\n"}) {
        CAPTURE(line);
        CHECK(text.find(line) != std::string::npos);
    }

    for (const char* line :
         {"gpushare_tenant_submissions_refused_total{tenant=\"chat \\\"1\\\"\",reason=\"queue_full\"} 0\n",
          "gpushare_tenant_submissions_cancelled_total{tenant=\"other\",reason=\"late\"} 0\n",
          "# TYPE gpushare_tenant_queueing_seconds histogram\n",
          "gpushare_tenant_queueing_seconds_bucket{tenant=\"chat \\\"1\\\"\",le=\"0.00001\"} 1\n",
          "gpushare_tenant_queueing_seconds_bucket{tenant=\"chat \\\"1\\\"\",le=\"10\"} 1\n",
          "gpushare_tenant_queueing_seconds_bucket{tenant=\"chat \\\"1\\\"\",le=\"+Inf\"} 1\n",
          "gpushare_tenant_queueing_seconds_sum{tenant=\"chat \\\"1\\\"\"} 0\n",
          "gpushare_tenant_queueing_seconds_count{tenant=\"chat \\\"1\\\"\"} 1\n",
          "gpushare_tenant_running_seconds_count{tenant=\"chat \\\"1\\\"\"} 1\n",
          "gpushare_tenant_running_seconds_bucket{tenant=\"other\",le=\"0.0025\"} 0\n"}) {
        CAPTURE(line);
        CHECK(text.find(line) != std::string::npos);
    }

    // And as a table, where its part is all there is.
    const auto table = tenant_table(chat);
    CHECK(
        table.starts_with("chat \"1\": 50.0 % of 2 devices, level 1, 0 in flight, 0 waiting, 0.0 s of device time\n"));
    CHECK(table.find("     1        4 MiB  8 MiB  4 MiB      0 MiB         4 MiB\n") != std::string::npos);
    CHECK(chat.memory(1).deallocate(p, 4 << 20) == gpushare::errc::none);
}

}  // namespace metrics_test
