// SPDX-License-Identifier: Apache-2.0
// Topologies and the choice of the best-connected devices, against brute force; splits that follow
// them; the catalogue.
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/topology.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace topology_test {

using namespace gpushare::literals;
using gpushare::best_connected;
using gpushare::connection_of;
using gpushare::device_id;
using gpushare::device_link;
using gpushare::device_room;
using gpushare::errc;
using gpushare::link_class;
using gpushare::topology;

namespace {

std::vector<device_id> up_to(std::uint32_t n) {
    std::vector<device_id> all;
    for (std::uint32_t i = 0; i < n; ++i) all.push_back({i});
    return all;
}

topology devices(std::uint32_t n) { return topology(std::vector<gpushare::device_description>(n)); }

/// Two sockets with a pair of NVLinked devices on two switches each: 0-1 2-3 | 4-5 6-7.
topology two_sockets() {
    auto t = devices(8);
    for (std::uint32_t a = 0; a < 8; ++a)
        for (std::uint32_t b = a + 1; b < 8; ++b)
            t.connect({a}, {b},
                      a / 2 == b / 2   ? device_link{link_class::nvlink, 4, true}
                      : a / 4 == b / 4 ? device_link{link_class::pcie_switch, 1, true}
                                       : device_link{link_class::inter_socket, 1, false});
    return t;
}

std::vector<device_id> ids(std::initializer_list<std::uint32_t> indices) {
    std::vector<device_id> all;
    for (const auto i : indices) all.push_back({i});
    return all;
}

}  // namespace

TEST_CASE("links compare by class, width and peer access, and so do their values", "[partition][topology]") {
    std::vector<device_link> all;
    for (int path = 0; path <= static_cast<int>(link_class::same_device); ++path)
        for (const auto width : std::to_array<std::uint8_t>({1, 2, 18, 255}))
            for (const bool peer : {false, true}) all.push_back({static_cast<link_class>(path), width, peer});
    for (const auto& a : all)
        for (const auto& b : all) REQUIRE((a < b) == (a.value() < b.value()));
    std::set<std::string_view> names;
    for (const auto& l : all) names.insert(to_string(l.path));
    CHECK(names.size() == 8);
}

TEST_CASE("a topology is symmetric, and a device is connected to itself", "[partition][topology]") {
    auto t = devices(3);
    t.connect({2}, {0}, {link_class::nvlink, 4, true});
    CHECK(t.between({0}, {2}) == device_link{link_class::nvlink, 4, true});
    CHECK(t.between({0}, {1}).path == link_class::none);
    t.connect({1}, {1}, {});
    CHECK(t.between({1}, {1}).path == link_class::same_device);
    CHECK_THROWS_AS(t.between({0}, {3}), gpushare::operation_error);
    CHECK_THROWS_AS(t.connect({3}, {0}, {}), gpushare::operation_error);
    CHECK_THROWS_AS(t.device({3}), gpushare::operation_error);
    CHECK(t == topology(t));
    CHECK(!(t == devices(3)));
}

TEST_CASE("the best connected devices are chosen", "[partition][topology]") {
    const auto t = two_sockets();
    CHECK(*best_connected(t, 1, up_to(8)) == ids({0}));
    CHECK(*best_connected(t, 2, up_to(8)) == ids({0, 1}));
    CHECK(*best_connected(t, 2, ids({7, 1, 2, 6})) == ids({6, 7}));
    CHECK(*best_connected(t, 3, up_to(8)) == ids({0, 1, 2}));
    CHECK(*best_connected(t, 4, up_to(8)) == ids({0, 1, 2, 3}));
    CHECK(*best_connected(t, 4, ids({0, 2, 4, 5, 6, 7})) == ids({4, 5, 6, 7}));
    CHECK(*best_connected(t, 8, up_to(8)) == up_to(8));
    // The worst link decides first: three on one socket rather than an NVLink and a device far
    // away.
    CHECK(*best_connected(t, 3, ids({0, 2, 3, 4, 5})) == ids({0, 2, 3}));
}

TEST_CASE("choices that can't be are refused", "[partition][topology]") {
    const auto t = two_sockets();
    CHECK(best_connected(t, 0, up_to(8)).code() == errc::invalid_specification);
    CHECK(best_connected(t, 9, up_to(8)).code() == errc::too_few_devices);
    CHECK(best_connected(t, 9, up_to(8)).why().left == 8);
    CHECK(best_connected(t, 1, up_to(0)).code() == errc::too_few_devices);
    CHECK(best_connected(t, 1, ids({1, 2, 1})).code() == errc::duplicate_device);
    CHECK(best_connected(t, 1, ids({8})).code() == errc::no_device);
}

TEST_CASE("the choice equals that of brute force, with the lowest ids among equals",
          "[partition][topology][property]") {
    for (std::uint64_t run = 0; run < 300; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        const auto n = static_cast<std::uint32_t>(1 + any.below(9));
        auto t = devices(n);
        for (std::uint32_t a = 0; a < n; ++a)
            for (std::uint32_t b = a + 1; b < n; ++b)
                t.connect({a}, {b},
                          {static_cast<link_class>(1 + any.below(3)), static_cast<std::uint8_t>(any.below(3)),
                           any.one_in(2)});
        for (std::uint32_t count = 1; count <= n; ++count) {
            std::vector<device_id> expected;
            for (std::uint32_t choice = 0; choice < 1U << n; ++choice) {
                if (static_cast<std::uint32_t>(std::popcount(choice)) != count) continue;
                std::vector<device_id> chosen;
                for (std::uint32_t i = 0; i < n; ++i)
                    if ((choice >> i & 1U) != 0) chosen.push_back({i});
                const auto now = connection_of(t, chosen), best = connection_of(t, expected);
                if (expected.empty() || now > best || (now == best && chosen < expected)) expected = chosen;
            }
            REQUIRE(*best_connected(t, count, up_to(n)) == expected);
        }
    }
}

TEST_CASE("of many devices a good choice is found, the same every time", "[partition][topology]") {
    constexpr std::uint32_t n = 64;  // eight islands of eight, one of them with wider links
    auto t = devices(n);
    for (std::uint32_t a = 0; a < n; ++a)
        for (std::uint32_t b = a + 1; b < n; ++b)
            t.connect({a}, {b},
                      a % 8 == b % 8
                          ? device_link{link_class::nvlink, static_cast<std::uint8_t>(a % 8 == 5 ? 12 : 4), true}
                          : device_link{link_class::network, 1, false});
    const auto chosen = *best_connected(t, 8, up_to(n));
    for (const auto d : chosen) CHECK(d.index % 8 == 5);
    CHECK(chosen == *best_connected(t, 8, up_to(n)));
    CHECK(best_connected(t, 9, up_to(n))->size() == 9);
    CHECK(std::ranges::is_sorted(chosen));
}

TEST_CASE("sixteen devices are chosen from exactly", "[partition][topology]") {
    auto t = devices(16);
    t.connect_all({link_class::nvlink, 1, true});  // all alike: nothing can be cut off early but by equality
    CHECK(*best_connected(t, 8, up_to(16)) == up_to(8));
}

TEST_CASE("a connected split takes the best connected of the devices with room", "[partition][topology]") {
    const auto t = two_sockets();
    std::vector<device_room> rooms;
    for (std::uint32_t i = 0; i < 8; ++i) rooms.push_back({{i}, 0, i == 0 ? 90_GiB : i == 3 ? 10_GiB : 40_GiB});
    const auto two = try_connected_split(40_GiB, 2, rooms, t, 1_GiB);
    CHECK(two->devices == ids({0, 1}));
    CHECK(two->per_device == 20_GiB);
    CHECK(try_connected_split(80_GiB, 4, rooms, t)->devices == ids({4, 5, 6, 7}));
    CHECK(try_connected_split(40_GiB, 4, rooms, t)->devices == ids({0, 1, 2, 3}));
    CHECK(try_connected_split(160_GiB, 8, rooms, t).code() == errc::no_room);
    CHECK(try_connected_split(160_GiB, 8, rooms, t).why().left == (10_GiB).count());
    CHECK(try_connected_split(9_GiB, 2, rooms, t, 1_GiB).code() == errc::not_whole);
    CHECK(try_connected_split(9_GiB, 0, rooms, t).code() == errc::invalid_specification);
    CHECK(try_connected_split(9_GiB, 9, rooms, t).code() == errc::too_few_devices);
    rooms[1].node = 1;
    CHECK(try_connected_split(2_GiB, 2, rooms, t).code() == errc::different_nodes);
    rooms = {{{0}, 0, 1_GiB}, {{9}, 0, 1_GiB}};
    CHECK(try_connected_split(2_GiB, 2, rooms, t).code() == errc::no_device);
    CHECK_THROWS_WITH(connected_split(2_GiB, 2, rooms, t),
                      "split of 2 GiB over 2 devices: device 9 is not in the topology");
    rooms = {{{0}, 0, 1_GiB}, {{0}, 0, 1_GiB}};
    CHECK(try_connected_split(2_GiB, 2, rooms, t).code() == errc::duplicate_device);
}

TEST_CASE("the host node is described by what it has", "[partition][topology]") {
    gpushare::host::node n({.devices = 3, .memory = 32_MiB, .sms = 1});
    const auto t = gpushare::describe(n);
    CHECK(t.size() == 3);
    CHECK(t.device({2}).memory == 32_MiB);
    CHECK(t.between({0}, {2}).peer_access);
}

TEST_CASE("a backend's findings become a topology", "[partition][topology]") {
    enum class link_kind { same_device, nvlink, pcie, host, across_sockets };
    struct found_link {
        link_kind kind;
        bool access;
    };
    struct found {
        struct device {
            gpushare::bytes memory{};
            std::uint32_t sms = 0;
        };
        std::vector<device> devices{{80_GiB, 132}, {80_GiB, 132}, {80_GiB, 132}};
        [[nodiscard]] found_link between(device_id a, device_id b) const {
            if (a == b) return {link_kind::same_device, true};
            if (a.index + b.index == 1) return {link_kind::nvlink, true};
            return a.index + b.index == 2 ? found_link{link_kind::pcie, true}
                                          : found_link{link_kind::across_sockets, false};
        }
    };
    const auto t = gpushare::describe(found{});
    CHECK(t.device({2}) == gpushare::device_description{80_GiB, 132});
    CHECK(t.between({0}, {1}) == device_link{link_class::nvlink, 1, true});
    CHECK(t.between({0}, {2}) == device_link{link_class::host_bridge, 1, true});
    CHECK(t.between({1}, {2}) == device_link{link_class::inter_socket, 1, false});
    CHECK(*best_connected(t, 2, up_to(3)) == ids({0, 1}));
}

TEST_CASE("the catalogue has nodes of 11 to 141 GiB with 1 to 16 devices", "[partition][topology]") {
    static_assert(gpushare::find_node_type("P16EN")->most_devices() == 16);
    gpushare::bytes least = gpushare::bytes::max(), most;
    std::set<std::uint32_t> counts;
    std::set<std::string_view> names;
    for (const auto& type : gpushare::node_types) {
        CAPTURE(type.name);
        least = std::min(least, type.device_memory);
        most = std::max(most, type.device_memory);
        CHECK(names.insert(type.name).second);
        CHECK(gpushare::find_node_type(type.name) == &type);
        for (std::uint32_t n = 0; n <= 17; ++n) {
            if (!type.offers(n)) {
                CHECK_THROWS_AS(gpushare::describe(type, n), gpushare::operation_error);
                continue;
            }
            counts.insert(n);
            const auto t = gpushare::describe(type, n);
            CHECK(t.size() == n);
            CHECK(t.device({n - 1}).memory == type.device_memory);
        }
    }
    CHECK(least == 11_GiB);
    CHECK(most == 141_GiB);
    CHECK(counts == std::set<std::uint32_t>{1, 2, 4, 8, 16});
    CHECK(gpushare::find_node_type("p16en") == nullptr);
}

TEST_CASE("the catalogue is that of the provider: twelve types, their network and their zones",
          "[partition][topology]") {
    struct row {
        std::string_view name;
        unsigned gib;
        std::vector<std::uint32_t> counts;
        bool rdma;
    };
    const std::vector<row> published{
        {"GU8TF", 96, {1, 2, 4, 8}, true},     {"GU8TEF", 141, {1, 2, 4, 8}, true},
        {"L20", 48, {1, 2, 4, 8}, false},      {"L20X", 141, {8}, true},
        {"P16EN", 96, {1, 2, 4, 8, 16}, true}, {"T4", 16, {1, 2}, false},
        {"A10", 24, {1, 2, 4, 8}, false},      {"G28Ti", 11, {1}, false},
        {"G49E", 48, {1, 2, 4, 8}, false},     {"G59", 32, {1, 2, 4, 8}, false},
        {"L20N", 48, {1, 2, 4, 8}, false},     {"L20NE", 72, {1, 2, 4, 8}, false},
    };
    CHECK(gpushare::node_types.size() == published.size());
    for (const auto& r : published) {
        CAPTURE(r.name);
        const auto* type = gpushare::find_node_type(r.name);
        REQUIRE(type != nullptr);
        CHECK(type->device_memory == r.gib * 1_GiB);
        CHECK(type->rdma == r.rdma);
        CHECK(link_between_nodes(*type).path == (r.rdma ? link_class::rdma : link_class::network));
        for (std::uint32_t n = 0; n <= 17; ++n)
            CHECK(type->offers(n) == (std::ranges::find(r.counts, n) != r.counts.end()));
        CHECK(std::ranges::any_of(gpushare::node_zones, [&](const auto& z) { return has_type(z.name, *type); }));
    }
    const std::vector<std::pair<std::string_view, std::set<std::string_view>>> zones{
        {"cn-wulanchabu-a", {"GU8TF", "L20", "G49E"}},
        {"cn-wulanchabu-b", {"G59"}},
        {"cn-wulanchabu-c", {"P16EN"}},
        {"cn-wulanchabu-d", {"P16EN", "L20NE"}},
        {"cn-beijing-d", {"GU8TF", "GU8TEF", "P16EN"}},
        {"cn-beijing-h", {"G28Ti"}},
        {"cn-beijing-i", {"A10", "G28Ti", "L20N"}},
        {"cn-beijing-l", {"L20", "G49E", "G59", "L20NE"}},
        {"cn-shanghai-e", {"G59", "G28Ti"}},
        {"cn-shanghai-f", {"GU8TF", "GU8TEF", "P16EN"}},
        {"cn-shanghai-l", {"L20", "G49E", "T4", "G28Ti"}},
        {"cn-shanghai-n", {"L20", "L20N"}},
        {"cn-shanghai-o", {"P16EN"}},
        {"cn-hangzhou-b", {"GU8TF", "L20", "G49E", "P16EN", "G59"}},
        {"cn-hangzhou-i", {"T4"}},
        {"cn-shenzhen-c", {"L20"}},
        {"cn-shenzhen-d", {"GU8TEF", "G49E", "G59"}},
        {"cn-shenzhen-e", {"T4"}},
        {"cn-hongkong-d", {"GU8TEF"}},
        {"ap-southeast-1", {"GU8TF", "L20", "L20X"}},
        {"eu-central-1-a", {"L20"}},
        {"eu-central-1-c", {"GU8TEF"}},
        {"me-east-1-a", {"GU8TEF"}},
        {"us-east-1-a", {"A10", "L20"}},
        {"us-east-1-b", {"A10", "L20"}},
    };
    CHECK(gpushare::node_zones.size() == zones.size());
    for (const auto& [name, types] : zones) {
        CAPTURE(name);
        REQUIRE(gpushare::find_node_zone(name) != nullptr);
        for (const auto& type : gpushare::node_types) CHECK(has_type(name, type) == types.contains(type.name));
        for (const auto type : gpushare::find_node_zone(name)->types)
            CHECK((type.empty() || gpushare::find_node_type(type) != nullptr));
    }
    CHECK(gpushare::has_type("cn-beijing-i", *gpushare::find_node_type("L20N")));
    CHECK_FALSE(gpushare::has_type("cn-beijing-i", *gpushare::find_node_type("L20NE")));
    CHECK_FALSE(gpushare::has_type("cn-nowhere-z", *gpushare::find_node_type("L20")));
}

TEST_CASE("a pod's labels say which nodes will do", "[partition][topology]") {
    using labels = std::vector<std::pair<std::string_view, std::string_view>>;
    const auto r = gpushare::read_acs_labels(labels{{"alibabacloud.com/compute-class", "gpu-hpn"},
                                                    {"alibabacloud.com/compute-qos", "default"},
                                                    {"topology.kubernetes.io/zone", "cn-hangzhou-b"}});
    std::set<std::string_view> types;
    for (const auto& z : gpushare::node_zones)
        for (const auto& t : gpushare::node_types)
            if (r.accepts(t, z)) types.insert(t.name);
    CHECK(types == std::set<std::string_view>{"GU8TF", "P16EN"});
    const auto l20 = gpushare::read_acs_labels(labels{{"alibabacloud.com/gpu-model-series", "L20"}});
    CHECK(l20.type == gpushare::find_node_type("L20"));
    CHECK(l20.accepts(*l20.type, *gpushare::find_node_zone("cn-shenzhen-c")));
    CHECK_FALSE(l20.accepts(*l20.type, *gpushare::find_node_zone("cn-shenzhen-d")));
    CHECK(gpushare::read_acs_labels(labels{}).type == nullptr);
    for (const labels& bad :
         {labels{{"alibabacloud.com/compute-class", "gpu_hpn"}}, labels{{"alibabacloud.com/gpu-model-series", "H100"}},
          labels{{"topology.kubernetes.io/zone", "cn-nowhere-z"}},
          labels{{"alibabacloud.com/gpu-model-series", "T4"}, {"topology.kubernetes.io/zone", "cn-beijing-d"}},
          labels{{"alibabacloud.com/compute-class", "gpu-hpn"}, {"alibabacloud.com/gpu-model-series", "T4"}}})
        CHECK_THROWS_WITH((void)gpushare::read_acs_labels(bad), Catch::Contains(std::string(bad.back().second)));
}

}  // namespace topology_test
