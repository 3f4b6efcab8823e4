// SPDX-License-Identifier: Apache-2.0
#include "inference_server/service.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace inference_server {

namespace {

using namespace std::chrono_literals;
using gpushare::instant;

constexpr gpushare::device_id device{0};

std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(in), {}};
    if (!in) throw std::runtime_error("cannot read " + path);
    return text;
}

std::pair<std::int64_t, std::uint64_t> look_at(const std::string& path) {
    struct stat s {};
    if (::stat(path.c_str(), &s) != 0) return {};
    return {s.st_mtim.tv_sec * 1'000'000'000 + s.st_mtim.tv_nsec, static_cast<std::uint64_t>(s.st_size)};
}

}  // namespace

service::service(service_options o, std::vector<model_source> models)
    : options_(std::move(o)),
      models_(std::move(models)),
      node_(options_.node),
      shared_(node_, {.events =
                          [](const gpushare::tenant_event& e) {
                              std::fprintf(stderr, "inference_server: tenant '%.*s': %s of %llu bytes\n",
                                           static_cast<int>(e.tenant.size()), e.tenant.data(),
                                           std::string(to_string(e.what)).c_str(),
                                           static_cast<unsigned long long>(e.size.count()));
                          }}),
      tenants_(shared_) {
    if (!options_.journal.empty()) journal_.emplace(options_.journal);
    seen_ = look_at(options_.tenants);
    apply(parse_tenants(read_file(options_.tenants)));
    if (!wrong_.empty()) throw std::runtime_error(wrong_);
    dispatcher_ = std::jthread([this](const std::stop_token& stop) { shared_.dispatch(device, stop); });
    housekeeper_ = std::jthread([this](const std::stop_token& stop) { keep_house(stop); });
}

service::~service() {
    housekeeper_.request_stop();
    housekeeper_.join();
    const auto deadline = gpushare::saturating_add(now(), 10s);
    for (const auto& [key, l] : lanes_) l->close(deadline);
    bill();
    drawn_.reset();
    lanes_.clear();
    tenants_.apply({}, deadline);
    dispatcher_.request_stop();
}

service::caller service::authenticate(std::string_view key) {
    const std::lock_guard lock(mutex_);
    const auto name = file_.tenant_of(key);
    if (name.empty()) throw refused(401, key.empty() ? "an API key is needed" : "nobody has this API key");
    auto who = tenants_.find(name);
    if (who == nullptr) throw refused(503, "the tenant isn't admitted", 10);
    return {std::move(who), rows_.find(name)->second.counts};
}

const model_info& service::model(std::string_view name, std::string_view version) const {
    for (const auto& m : models_)
        if (m.info.name == name && (version.empty() || version == model_version)) return m.info;
    throw refused(404, "unknown model '" + std::string(name.substr(0, 64)) + "'" +
                           (version.empty() ? "" : ", version '" + std::string(version.substr(0, 64)) + "'"));
}

std::shared_ptr<lane> service::lane_of(const caller& c, std::string_view model) {
    const std::lock_guard lock(mutex_);
    if (draining_) throw refused(503, "the server is going down", 5);
    auto& row = rows_[c.who->name()];
    if (row.asleep) {
        c.who->wake();
        row.asleep = false;
    }
    const std::pair key(c.who->name(), std::string(model));
    auto found = lanes_.find(key);
    if (found == lanes_.end()) {
        const auto m = std::ranges::find(models_, model, [](const model_source& s) { return s.info.name; });
        if (m == models_.end()) throw refused(404, "unknown model");
        const auto streams = c.who->spec().streams;
        // Made first: a tenant that is going throws, and leaves no lane.
        found = lanes_
                    .emplace(key, std::make_shared<lane>(
                                      c.who, *m, c.counts, [this](std::function<void()> f) { later(std::move(f)); },
                                      static_cast<std::uint32_t>(m - models_.begin()) % streams))
                    .first;
    }
    found->second->touch();
    return found->second;
}

std::vector<std::shared_ptr<lane>> service::lanes_of(std::string_view whose) {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<lane>> all;
    for (const auto& [key, l] : lanes_)
        if (key.first == whose) all.push_back(l);
    return all;
}

void service::infer(const caller& c, std::string_view name, infer_request r, on_answer reply) {
    check_inputs(model(name), r);
    lane_of(c, name)->infer(std::move(r), std::move(reply));
}

std::shared_ptr<token_stream> service::generate(const caller& c, std::string_view name, generate_request r) {
    if (!model(name).streams) throw refused(400, "the model makes no tokens");
    return std::make_shared<token_stream>(lane_of(c, name), std::move(r.prompt), r.most_tokens);
}

void service::load(const caller& c, std::string_view name, std::function<void(const refused*)> done) {
    (void)model(name);
    lane_of(c, name)->load(std::move(done));
}

void service::unload(const caller& c, std::string_view name) {
    (void)model(name);
    if (!lane_of(c, name)->unload()) throw refused(409, "the model is in use");
}

bool service::ready(const caller& c, std::string_view name) {
    (void)model(name);
    return ready() && c.who != nullptr;  // what isn't loaded is, when it is asked
}

std::vector<service::index_entry> service::index(const caller& c) {
    std::vector<index_entry> all;
    for (const auto& m : models_) all.push_back({m.info.name, false});
    for (const auto& l : lanes_of(c.who->name()))
        if (l->now() == lane::state::ready) std::ranges::find(all, l->info().name, &index_entry::name)->ready = true;
    return all;
}

bool service::ready() const {
    const std::lock_guard lock(mutex_);
    return !draining_ && !node_.lost(device);
}

bool service::drain(instant deadline) {
    std::vector<std::shared_ptr<lane>> all;
    {
        const std::lock_guard lock(mutex_);
        draining_ = true;
        for (const auto& [key, l] : lanes_) all.push_back(l);
    }
    for (const auto& l : all)
        while (l->idle_since() == gpushare::never) {
            if (now() >= deadline) return false;
            std::this_thread::sleep_for(2ms);
        }
    return true;
}

void service::later(std::function<void()> f) {
    {
        const std::lock_guard lock(later_mutex_);
        later_.push_back(std::move(f));
    }
    later_comes_.notify_one();
}

void service::keep_house(const std::stop_token& stop) {
    auto second = std::chrono::steady_clock::now();
    for (unsigned round = 0; !stop.stop_requested();) {
        std::unique_lock lock(later_mutex_);
        later_comes_.wait_for(lock, stop, 100ms, [&] { return !later_.empty(); });
        if (!later_.empty()) {
            const auto f = std::move(later_.front());
            later_.pop_front();
            lock.unlock();
            f();
        } else {
            lock.unlock();
        }
        if (std::chrono::steady_clock::now() < second) continue;
        second = std::chrono::steady_clock::now() + 1s;
        try {
            reload_if_changed();
            bill();
            let_idle_go();
            if (++round % 5 == 0)
                for (const auto& t : tenants_.all()) t->pardon();  // a quarantine is short
        } catch (const std::exception& e) {
            tell(e.what());
        }
    }
    for (std::deque<std::function<void()>> rest;;) {  // somebody waits for each; what runs may add some
        {
            const std::lock_guard lock(later_mutex_);
            rest.swap(later_);
        }
        if (rest.empty()) return;
        for (const auto& f : rest) f();
        rest.clear();
    }
}

void service::reload_if_changed() {
    const auto is = look_at(options_.tenants);
    {
        const std::lock_guard lock(mutex_);
        if (is == seen_) return;
    }
    (void)reload();
}

std::string service::reload() {
    std::string why;
    try {
        const auto is = look_at(options_.tenants);
        auto next = parse_tenants(read_file(options_.tenants));
        {
            const std::lock_guard lock(mutex_);
            seen_ = is;
            wrong_.clear();
        }
        apply(std::move(next));
        const std::lock_guard lock(mutex_);
        why = wrong_;
    } catch (const std::exception& e) {
        why = e.what();
        const std::lock_guard lock(mutex_);
        seen_ = look_at(options_.tenants);  // not before it changes again
        wrong_ = why;
    }
    tell(why.empty() ? "tenants: as the file has them" : "tenants: " + why);
    return why;
}

void service::apply(tenants_file next) {
    const auto deadline = gpushare::saturating_add(now(), 5s);
    std::vector<std::shared_ptr<tenant>> gone;
    for (auto& t : tenants_.all())
        if (std::ranges::find(next.specs, t->name(), &gpushare::tenant_spec::name) == next.specs.end())
            gone.push_back(std::move(t));
    for (const auto& t : gone) {  // who goes gives its models' memory back first
        for (const auto& l : lanes_of(t->name())) l->close(deadline);
        const std::lock_guard lock(mutex_);
        std::erase_if(lanes_, [&](const auto& l) { return l.first.first == t->name(); });
    }
    auto specs = next.specs;
    for (auto& s : specs) s.queue_limit = 0;  // it is about requests here, not about submissions
    std::string why;
    for (const auto& o : tenants_.apply(specs, deadline))
        if (o.what == gpushare::directory_outcome::kind::refused) why += o.why + "; ";
    {
        const std::lock_guard lock(mutex_);
        wrong_ = why;
        for (const auto& s : next.specs) rows_[s.name].counts->queue_limit = s.queue_limit;
        file_ = std::move(next);
    }
    bill(gone);  // the last of theirs, and where the new ones begin
}

// Once a second, at each change, and at the end. `gone`: closed, so that their usage is final.
void service::bill(const std::vector<std::shared_ptr<tenant>>& gone) {
    const std::lock_guard billing(billing_);
    auto& lines = unwritten_;
    const auto time = std::chrono::time_point_cast<gpushare::ns>(std::chrono::system_clock::now());
    const auto read = [&](tenant& t) {
        auto r = gpushare::reading_of(t.usage());
        const std::lock_guard lock(mutex_);
        auto& row = rows_[t.name()];
        r.requests = row.counts->requests.load(std::memory_order_relaxed);
        r.refusals = row.counts->refusals.load(std::memory_order_relaxed);
        if (!row.meter) row.meter.emplace(t.name());
        if (auto line = row.meter->read(time, r)) lines.push_back(*std::move(line));
    };
    for (const auto& t : gone) {
        read(*t);
        const std::lock_guard lock(mutex_);
        rows_[t->name()].meter.reset();
    }
    for (const auto& t : tenants_.all()) read(*t);
    constexpr std::size_t most = 100'000;  // lines that are kept where a disk is full
    const auto why = journal_ ? journal_->try_append(lines) : gpushare::failure{};
    if (why.code != gpushare::errc::none) tell("the journal can't be written: " + std::string(to_string(why.code)));
    if (why.code == gpushare::errc::none || lines.size() > most) lines.clear();
}

// Under the lock, so that nobody finds a lane meanwhile whose tenant is put to sleep.
void service::let_idle_go() {
    const auto before = now() - gpushare::ns{options_.idle_after};
    const std::lock_guard lock(mutex_);
    for (const auto& t : tenants_.all()) {
        bool idle = true;
        for (const auto& [key, l] : lanes_) {
            if (key.first != t->name()) continue;
            if (l->now() == lane::state::ready && l->idle_since() < before) (void)l->unload();
            idle = idle && l->now() == lane::state::unloaded && l->idle_since() < before;
        }
        auto& row = rows_[t->name()];
        if (idle && !row.asleep) row.asleep = t->sleep(now());  // its pools and caches go as well
    }
}

void service::tell(const std::string& what) const { std::fprintf(stderr, "inference_server: %s\n", what.c_str()); }

}  // namespace inference_server
