// SPDX-License-Identifier: Apache-2.0
#include "inference_server/service.hpp"

#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <stdexcept>
#include <thread>

namespace inference_server {

namespace {

using namespace std::chrono_literals;
using gpushare::instant;

std::vector<std::shared_ptr<const model_source>> shared(std::vector<model_source> all) {
    std::vector<std::shared_ptr<const model_source>> out;
    for (auto& m : all) out.push_back(std::make_shared<const model_source>(std::move(m)));
    return out;
}

const std::string& name_of(const std::shared_ptr<const model_source>& m) noexcept { return m->info.name; }

/// Null if there is no gate: on the host, and if a profiler has the subscriber that the gate needs.
std::unique_ptr<call_gate> gate_of(server_node& on, const call_gate_options& o) {
    if (!has_call_gate) return nullptr;
    try {
        return std::make_unique<call_gate>(on, o);
    } catch (const gpushare::error& e) {
        std::fprintf(stderr, "inference_server: one thread makes all calls, and no launch is held: %s\n", e.what());
    }
    return nullptr;
}

/// Calls `f` again after an exception, usually for lack of the host's memory, of which other threads
/// may give some back. After the last try, says what didn't happen.
template <class F>
void insist(const F& f, const char* what, int tries = std::numeric_limits<int>::max()) noexcept {
    for (int n = 1;; ++n) try {
            return f();
        } catch (const std::exception& e) {
            if (n == tries) return (void)std::fprintf(stderr, "inference_server: %s: %s\n", what, e.what());
            std::this_thread::sleep_for(10ms);
        }
}
constexpr int tries_without_memory = 100;

}  // namespace

service::service(service_options o, std::vector<model_source> models)
    : options_(std::move(o)),
      rule_{.drop_caches_after = gpushare::ns{options_.idle_after} / 4,
            .release_after = options_.idle_after,
            .wake_within = options_.wake_within},
      models_(shared(std::move(models))),
      node_(options_.node),
      cache_memory_(memory_for_caches(node_)),
      scrubbing_(node_.make_stream(server_device)),
      chunks_(cache_memory_, scrubbing_,
              {.capacity = static_cast<std::size_t>(memory_of(node_) / cache_memory_.granularity()),
               .scrub = gpushare::scrub_policy::on_free}),
      shared_(node_, {.events =
                          [](const gpushare::tenant_event& e) {
                              std::fprintf(stderr, "inference_server: tenant '%.*s': %s of %llu bytes\n",
                                           static_cast<int>(e.tenant.size()), e.tenant.data(),
                                           std::string(to_string(e.what)).c_str(),
                                           static_cast<unsigned long long>(e.size.count()));
                          }}),
      tenants_(shared_),
      gate_(gate_of(node_, options_.gate)) {
    if (!options_.journal.empty()) journal_.emplace(options_.journal);
    auto [text, look] = read_file(options_.tenants);
    seen_ = look;
    apply(parse_tenants(text, options_.tenants));
    if (!wrong_.empty()) throw std::runtime_error(wrong_);
    dispatcher_ = std::jthread([this](const std::stop_token& stop) { shared_.dispatch(server_device, stop); });
    housekeeper_ = std::jthread([this](const std::stop_token& stop) { keep_house(stop); });
    timekeeper_ = std::jthread([this](const std::stop_token& stop) { tell_late(stop); });
}

service::~service() {
    for (auto* const thread : {&housekeeper_, &timekeeper_}) {
        thread->request_stop();
        thread->join();
    }
    // Goes on only once no engine's thread uses the memory any more.
    insist([this] { (void)end_calls(gpushare::never, {}); }, "ending the calls");
    insist([this] { last_bill(); }, "the last bill", tries_without_memory);
    if (gate_ != nullptr) gate_->end();
    drawn_.reset();
    keys_.reset();
    for (auto& [name, row] : rows_) {
        row.lanes.clear();
        row.room.reset();
        row.calls.reset();
        row.who.reset();
    }
    insist([this] { tenants_.apply({}, gpushare::saturating_add(now(), 10s)); }, "closing the tenants",
           tries_without_memory);
    dispatcher_.request_stop();
}

// Includes lanes of tenants and models that are gone.
std::vector<std::shared_ptr<lane>> service::lanes_at_end() const {
    auto lanes = all_lanes();
    const std::lock_guard lock(mutex_);
    for (const auto& weak : outlasting_)
        if (auto l = weak.lock()) lanes.push_back(std::move(l));
    return lanes;
}

std::vector<service::running> service::stop(instant deadline, const std::stop_token& hurry) {
    auto left = end_calls(deadline, hurry);
    last_bill();
    return left;
}

std::vector<service::running> service::end_calls(instant deadline, const std::stop_token& hurry) {
    refuse_new();
    const auto lanes = lanes_at_end();
    for (const auto& l : lanes) l->close(now());  // as in close_all()
    for (const auto& l : lanes) l->close(deadline, hurry);
    (void)loads_.stop(deadline, hurry);  // a caller waits for each remaining load
    std::vector<running> left;
    for (const auto& l : lanes)
        if (l->works()) left.push_back({std::string(l->whose()), l->info().name});
    return left;
}

void service::last_bill() {
    // A reload under way notes its lanes itself. A reload that failed half-way, and wasn't
    // repeated, has left some lanes.
    if (const std::unique_lock reloading(reloading_, std::try_to_lock); reloading) note_gone();
    bill();
    const std::lock_guard billing(billing_);
    if (!unwritten_.empty()) tell("the journal can't be written, and this isn't in it:");
    std::ranges::reverse(unwritten_);
    // if to_text() has no memory, the remaining lines stay
    for (; !unwritten_.empty(); unwritten_.pop_back()) std::fputs(to_text(unwritten_.back()).c_str(), stderr);
}

void leave(const std::vector<service::running>& beside) noexcept {
    for (const auto& r : beside)
        std::fprintf(stderr, "inference_server: tenant '%s': model '%s' still runs; the server ends without it\n",
                     r.tenant.c_str(), r.model.c_str());
    std::fflush(nullptr);
    std::_Exit(exit_beside_calls);
}

service::caller service::authenticate(std::string_view key) {
    if (key.empty()) throw refused(401, "an API key is needed");
    const auto ring = keys();
    const auto found = ring->file.keys.find(key);
    if (!found || ring->entries[*found].who.is_revoked()) throw refused(401, "nobody has this API key");
    if (ring->entries[*found].who.who == nullptr) throw refused(503, "the tenant isn't admitted", 10);
    return ring->entries[*found].who;
}

// Done before any wait for the work of removed tenants, so that a revoked key stops working at
// once.
void service::revoke_gone(const tenants_file& next) const {
    const auto ring = keys();
    for (std::size_t i = 0; i < ring->entries.size(); ++i)
        if (next.tenant_of(ring->file.keys[i]) != ring->file.tenants_of_keys[i])
            ring->entries[i].revoked->store(true, std::memory_order_relaxed);
}

// A key that still belongs to the same tenant stays valid.
std::shared_ptr<const service::key_ring> service::ring_of(tenants_file next) {
    auto ring = std::make_shared<key_ring>();
    const auto before = keys();
    for (std::size_t i = 0; i < next.keys.size(); ++i) {
        const auto& name = next.tenants_of_keys[i];
        key_ring::entry e;
        e.who.who = tenants_.find(name);
        e.revoked = std::make_shared<std::atomic<bool>>(false);
        {
            const std::lock_guard lock(mutex_);
            e.who.counts = rows_[name].counts;
        }
        if (const auto was = before->file.keys.find(next.keys[i])) {
            const auto& old = before->entries[*was];
            if (old.who.who == e.who.who && !old.who.is_revoked())
                e.revoked = old.revoked;
            else
                old.revoked->store(true, std::memory_order_relaxed);
        }
        e.who.revoked = e.revoked;
        ring->entries.push_back(std::move(e));
    }
    ring->file = std::move(next);
    return ring;
}

std::shared_ptr<const model_source> service::model(const caller& c, std::string_view name,
                                                   std::string_view version) const {
    if (version.empty() || version == model_version) {
        const auto m = std::ranges::find(models_, name, name_of);
        if (m != models_.end()) return *m;
        const std::lock_guard lock(mutex_);
        const auto row = rows_.find(c.who->name());
        if (row != rows_.end() && row->second.who == c.who)
            for (const auto& own : row->second.models)
                if (own->setting.name == name) return own->source;
    }
    throw refused(404, "unknown model '" + std::string(name.substr(0, 64)) + "'" +
                           (version.empty() ? "" : ", version '" + std::string(version.substr(0, 64)) + "'"));
}

std::shared_ptr<lane> service::lane_of(const caller& c, std::string_view model) {
    const std::lock_guard lock(mutex_);
    if (draining_) throw refused(503, "the server is going down", 5);
    const auto whose = rows_.find(c.who->name());
    // By now another tenant may have this name.
    if (whose == rows_.end() || whose->second.who != c.who) throw refused(503, "the tenant is gone");
    auto& row = whose->second;
    row.asleep = false;  // the lane wakes the tenant
    if (const auto found = row.lanes.find(model); found != row.lanes.end()) return found->second;
    auto number = static_cast<std::size_t>(std::ranges::find(models_, model, name_of) - models_.begin());
    auto m = number < models_.size() ? models_[number] : nullptr;
    for (const auto& own : row.models) {
        if (m == nullptr) ++number;
        if (own->setting.name == model) m = own->source;
    }
    if (m == nullptr) throw refused(404, "unknown model");
    const auto stream = static_cast<std::uint32_t>(number % c.who->spec().streams);
    constexpr gpushare::bytes most_scratch{std::uint64_t{256} << 20};
    if (row.room == nullptr) row.room = std::make_shared<scratch>(c.who->memory(), most_scratch);
    // Rows of removed tenants are still there if their last bill wasn't written.
    if (gate_ != nullptr && (row.calls == nullptr || !row.calls->are_of(*c.who))) row.calls = gate_->add(c.who);
    auto mine = std::make_shared<lane>(
        c.who, std::move(m), c.counts,
        lane::settings{
            .run_later = [this, whose = c.counts.get()](std::function<void()> f) { later(std::move(f), whose); },
            .stream = stream,
            .rule = rule_,
            .node = &node_,
            .chunks = &chunks_,
            .room = row.room,
            .on_deadline = [this](gpushare::instant when) { expect_late(when); },
            .freed = freed_,
            .on_freed = [this] { let_texts_begin(); },
            .text_waits = options_.text_waits,
            .calls = row.calls});
    return row.lanes.emplace(model, std::move(mine)).first->second;
}

std::vector<std::shared_ptr<lane>> service::lanes_of(std::string_view whose) const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<lane>> all;
    if (const auto row = rows_.find(whose); row != rows_.end())
        for (const auto& [model, l] : row->second.lanes) all.push_back(l);
    return all;
}

std::vector<std::shared_ptr<lane>> service::all_lanes() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<lane>> all;
    for (const auto& [name, row] : rows_)
        for (const auto& [model, l] : row.lanes) all.push_back(l);
    return all;
}

void service::infer(const caller& c, std::string_view name, infer_request r, on_answer reply) {
    check_inputs(model(c, name)->info, r);
    const auto by = lane_of(c, name);
    check_inputs(by->info(), r);  // a reload may have changed the model in between
    by->infer(std::move(r), std::move(reply));
}

std::shared_ptr<token_stream> service::generate(const caller& c, std::string_view name, generate_request r) {
    if (!model(c, name)->info.streams) throw refused(400, "the model makes no tokens");
    return lane_of(c, name)->generate(std::move(r.prompt), r.most_tokens);
}

void service::load(const caller& c, std::string_view name, std::function<void(const refused*)> done) {
    (void)model(c, name);
    lane_of(c, name)->load(std::move(done));
}

void service::unload(const caller& c, std::string_view name) {
    (void)model(c, name);
    if (!lane_of(c, name)->unload()) throw refused(409, "the model is in use");
}

bool service::ready(const caller& c, std::string_view name) {
    (void)model(c, name);
    return ready() && c.who != nullptr;  // a model that isn't loaded is loaded on request
}

std::vector<service::index_entry> service::index(const caller& c) {
    std::vector<index_entry> all;
    for (const auto& m : models_) all.push_back({m->info.name, false});
    {
        const std::lock_guard lock(mutex_);
        if (const auto row = rows_.find(c.who->name()); row != rows_.end())
            for (const auto& own : row->second.models) all.push_back({own->setting.name, false});
    }
    for (const auto& l : lanes_of(c.who->name()))
        if (const auto at = std::ranges::find(all, l->info().name, &index_entry::name);
            at != all.end() && l->now() == lane::state::ready)
            at->ready = true;
    return all;
}

bool service::ready() const {
    return !draining_.load(std::memory_order_relaxed) && !node_.lost(server_device) &&
           shut_.load(std::memory_order_relaxed) == 0;
}

void service::refuse_new() {
    const std::lock_guard lock(mutex_);
    draining_ = true;
}

bool service::drain(instant deadline, const std::stop_token& hurry) {
    refuse_new();
    return std::ranges::all_of(lanes_at_end(), [&](const auto& l) { return l->wait_idle(deadline, hurry); });
}

// Loads run one at a time, so that a slow load doesn't take all the memory. Tenants take turns.
void service::later(std::function<void()> f, const void* whose) {
    loads_.later(
        [f = std::move(f)] {
            try {
                f();
            } catch (const std::exception& e) {
                tell(e.what());
            }
        },
        whose);
}

// Calls every function, even if one throws.
void service::answer_all(const std::vector<on_reload>& asked, std::string_view why) noexcept {
    for (const auto& done : asked) try {
            done(why);
        } catch (...) {  // for lack of the host's memory: the others are still told
        }
}

// The work of each second, and reloads. It has a thread of its own, so a long load doesn't delay
// bills and tenants, and a reload that waits for a tenant's work doesn't delay a load.
void service::keep_house(const std::stop_token& stop) {
    for (unsigned round = 0;;) {
        std::unique_lock lock(reloads_mutex_);
        reload_comes_.wait_for(lock, stop, 1s, [&] { return !reloads_.empty(); });
        const auto asked = std::exchange(reloads_, {});
        lock.unlock();
        if (stop.stop_requested()) return answer_all(asked, "the server is going down");
        try {  // done first, because some lanes wait only for this call
            for (const auto& l : all_lanes()) l->look_again();
        } catch (const std::exception& e) {
            tell(e.what());
        }
        if (!asked.empty()) try {
                wait_until_written();
                answer_all(asked, reload());
            } catch (const std::exception& e) {
                answer_all(asked, e.what());
            }
        try {
            if (asked.empty()) reload_if_changed();
            bill();
            tell_forced();
            let_idle_go();
            if (asked.empty() && ++round % 5 == 0) {
                for (const auto& t : tenants_.all()) t->pardon();  // a quarantine is short
                // otherwise the allocator would keep the memory of thousands of connections
                (void)::malloc_trim(0);
            }
        } catch (const std::exception& e) {
            tell(e.what());
        }
    }
}

void service::expect_late(gpushare::instant when) noexcept {
    {
        const std::lock_guard lock(late_mutex_);
        if (when >= late_at_) return;
        late_at_ = when;
    }
    late_comes_.notify_one();
}

// A request that waits behind a long call, or for a model that loads, is answered at its deadline
// and not at the end of that call or load. This has a thread of its own, because the work of each
// second may take seconds.
void service::tell_late(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
        {
            std::unique_lock lock(late_mutex_);
            const auto when = late_at_;
            const auto left = std::min(when, gpushare::saturating_add(now(), gpushare::ns{1min})) - now();
            late_comes_.wait_for(lock, stop, left, [&] { return late_at_ < when; });
            if (now() < late_at_) continue;
            late_at_ = gpushare::never;
        }
        try {
            for (const auto& l : all_lanes()) expect_late(l->refuse_late());
        } catch (...) {  // for lack of the host's memory: the requests are told a little later
            expect_late(gpushare::saturating_add(now(), gpushare::ns{100ms}));
        }
    }
}

// Waits until the file looks the same a second later, because it may be half written.
void service::reload_if_changed() {
    const auto is = look_at(options_.tenants);
    {
        const std::lock_guard lock(mutex_);
        if (is == seen_ || std::exchange(changed_, is) != is) return;
    }
    (void)reload();
}

// Without the wait, a fast test or operator could reload the file while it is still being written.
void service::wait_until_written() const {
    constexpr auto quiet = 100ms;
    for (int i = 0; i < 10; ++i) {
        const auto time = std::chrono::system_clock::now().time_since_epoch();
        const auto since = time - std::chrono::nanoseconds(look_at(options_.tenants).written);
        if (since < 0s || since > quiet) return;
        std::this_thread::sleep_for(quiet);
    }
}

std::string service::reload() {
    const std::lock_guard reloading(reloading_);
    std::string why;
    const auto saw = [&](const file_look& look) {
        const std::lock_guard lock(mutex_);
        seen_ = look;
    };
    bool is_new = true;
    const auto is_wrong = [&](const char* what) {
        why = what;
        const std::lock_guard lock(mutex_);
        is_new = wrong_ != why;
        wrong_ = why;
    };
    try {
        auto [text, look] = read_file(options_.tenants);
        saw(look);  // an invalid file isn't read again before it changes
        apply(parse_tenants(text, options_.tenants));
        const std::lock_guard lock(mutex_);
        why = wrong_;
    } catch (const std::bad_alloc&) {
        // the file isn't at fault, so it is read again a second later
        saw({});
        throw;
        // here, too, the file isn't at fault: usually there is no file descriptor
    } catch (const unreadable& e) {
        saw({});
        is_wrong(e.what());
    } catch (const std::exception& e) {
        is_wrong(e.what());
    }
    if (is_new) tell("tenants: ", why.empty() ? std::string_view("as the file has them") : why);
    return why;
}

void service::reload_soon(on_reload done) {
    {
        const std::lock_guard lock(reloads_mutex_);
        reloads_.push_back(std::move(done));
    }
    reload_comes_.notify_one();
}

void service::close_all(const std::vector<std::shared_ptr<lane>>& lanes, instant deadline) {
    // waiting requests are refused at once, without waiting for other lanes' work
    for (const auto& l : lanes) l->close(now());
    for (const auto& l : lanes) l->close(deadline);
    const std::lock_guard lock(mutex_);
    std::erase_if(outlasting_, [](const auto& weak) {
        const auto l = weak.lock();
        return l == nullptr || !l->works();
    });
}

// Called under the mutex, for lanes that leave their row. From then on, the lanes are in
// outlasting_. A stop() that comes while they close therefore also waits for them and names them.
void service::make_room(std::vector<std::shared_ptr<lane>>& leaving, std::size_t more) {
    outlasting_.reserve(outlasting_.size() + more);
    leaving.reserve(leaving.size() + more);
}

// They give back their models' memory first. From here on no client gets one of these lanes.
void service::close_gone(const tenants_file& next, instant deadline) {
    std::vector<std::shared_ptr<lane>> lanes;
    {
        const std::lock_guard lock(mutex_);
        for (auto& [name, row] : rows_) {
            if (row.who == nullptr ||
                std::ranges::find(next.specs, name, &gpushare::tenant_spec::name) != next.specs.end())
                continue;
            leaving_.reserve(leaving_.size() + 1);
            make_room(lanes, row.lanes.size());
            leaving_.push_back(std::exchange(row.who, nullptr));
            for (auto& [model, l] : row.lanes) {
                outlasting_.push_back(l);
                lanes.push_back(std::move(l));
            }
            row.lanes.clear();
            row.room.reset();
            row.asleep = false;
        }
    }
    close_all(lanes, deadline);
}

// The directory has applied a file, so the usage of removed tenants is final. The directory may
// still have some of them if an earlier file failed half-way.
void service::note_gone() {
    const std::lock_guard billing(billing_);
    gone_.reserve(gone_.size() + leaving_.size());
    for (const auto& t : leaving_)
        if (tenants_.find(t->name()) != t) gone_.push_back(t);
    leaving_.clear();
}

// Throws model_setting_error for every error, except for lack of the host's memory.
std::shared_ptr<const service::own_model> service::made(const model_setting& m) const {
    const auto fail = [&](std::string_view setting, std::string_view why) {
        throw model_setting_error(options_.tenants, m.line, setting, why);
    };
    if (std::ranges::find(models_, m.name, name_of) != models_.end())
        fail("model", "has the name of one of the server's");
    if (!options_.model_of) fail("model", "the server is built without ONNX");
    std::filesystem::path path(m.path);
    if (path.is_relative()) path = std::filesystem::path(options_.tenants).parent_path() / path;
    const auto look = look_at(path.string());
    if (look == file_look{}) fail("model", "there is no such file");
    {
        const std::lock_guard lock(mutex_);
        for (const auto& [name, row] : rows_)
            for (const auto& own : row.models)
                if (own->setting.same_as(m) && own->look == look) return own;
    }
    try {
        auto source = std::make_shared<const model_source>(options_.model_of(m, path.string()));
        return std::make_shared<const own_model>(own_model{m, look, std::move(source)});
    } catch (const std::bad_alloc&) {
        throw;
    } catch (const unknown_engine& e) {
        fail("engine", e.what());
    } catch (const std::exception& e) {
        fail("model", m.name + ": " + e.what());
    }
    return nullptr;
}

// Done before any part of the file is carried out, because an invalid model makes the file invalid.
std::map<std::string, service::own_models> service::models_of(const tenants_file& next) const {
    std::map<std::string, own_models> all;
    for (const auto& m : next.models) all[m.tenant].push_back(made(m));
    return all;
}

// Models that the tenants no longer have, or that have changed, answer their requests and then go.
void service::close_changed(std::map<std::string, own_models> next, instant deadline) {
    std::vector<std::shared_ptr<lane>> lanes;
    {
        const std::lock_guard lock(mutex_);
        for (auto& [name, row] : rows_) {
            auto now = std::move(next[name]);
            for (const auto& own : row.models) {
                if (std::ranges::find(now, own) != now.end()) continue;
                const auto l = row.lanes.find(own->setting.name);
                if (l == row.lanes.end()) continue;
                make_room(lanes, 1);
                outlasting_.push_back(l->second);
                lanes.push_back(std::move(l->second));
                row.lanes.erase(l);
            }
            row.models = std::move(now);
        }
    }
    close_all(lanes, deadline);
}

void service::apply(tenants_file next) {
    const auto deadline = gpushare::saturating_add(now(), gpushare::ns{options_.closes_within});
    auto specs = next.specs;
    for (auto& s : specs) s.queue_limit = 0;  // here the limit concerns requests, not submissions
    tenants_.check(specs);
    auto models = models_of(next);
    revoke_gone(next);
    close_gone(next, deadline);
    const auto outcomes = tenants_.apply(specs, deadline);
    note_gone();
    // Makes the old tenants' last bills, and notes where the new meters begin, before any client
    // can use the new tenants.
    bill();
    std::string why;
    for (const auto& o : outcomes)
        if (o.what == gpushare::directory_outcome::kind::refused) why += o.why + "; ";
    {
        const std::lock_guard lock(mutex_);
        for (auto& t : tenants_.all()) rows_[t->name()].who = t;
        for (const auto& [name, own] : models) (void)rows_[name];
        for (const auto& s : next.specs) rows_[s.name].counts->queue_limit = s.queue_limit;
        wrong_ = why;
    }
    close_changed(std::move(models), gpushare::saturating_add(now(), gpushare::ns{options_.closes_within}));
    auto ring = ring_of(std::move(next));
    const std::lock_guard lock(keys_mutex_);
    keys_.swap(ring);  // the old keys are destroyed without the lock
}

namespace {

/// The time of day runs a little faster or slower than the steady clock, which determines a line's
/// length.
constexpr gpushare::ns clocks_differ{10'000'000};

/// Combines lines into fewer lines with the same amounts: one for each span of a tenant without a
/// gap. If the host has no memory, the lines stay as they are.
void sum_by_tenant(std::vector<gpushare::usage_line>& lines) noexcept try {
    std::vector<gpushare::usage_line> sums;
    std::map<std::string, std::size_t, std::less<>> last;
    for (const auto& l : lines) {
        const auto [at, is_new] = last.try_emplace(l.tenant, sums.size());
        if (!is_new && std::chrono::abs(l.from - sums[at->second].until) <= clocks_differ) {
            sums[at->second].until = std::max(sums[at->second].until, l.until);
            sums[at->second].amounts += l.amounts;
        } else {
            at->second = sums.size();
            sums.push_back(l);
        }
    }
    lines = std::move(sums);
} catch (...) {  // the lines are summed the next time
}

}  // namespace

// At the gate each launch is timed by itself. The limiter's account has a call from its beginning
// to its end, including the time in which its thread was held or computed.
gpushare::tenant_usage service::usage_of(tenant& t) const {
    auto usage = t.usage();
    if (const auto calls = calls_of(t)) usage.device_time = calls->device_time();
    return usage;
}

gpushare::ns service::launch_time_of(tenant& t) const {
    const auto calls = calls_of(t);
    return calls == nullptr ? t.usage().device_time : calls->launch_time();
}

// Null without a gate, and before the tenant's first call. By now another tenant may have its name.
std::shared_ptr<tenant_calls> service::calls_of(const tenant& t) const {
    if (!has_call_gate) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto row = rows_.find(t.name());
    if (row == rows_.end() || row->second.calls == nullptr || !row->second.calls->are_of(t)) return nullptr;
    return row->second.calls;
}

// Called under billing_. Throws if the host has no memory; nothing was read then.
void service::read_meter(tenant& t, gpushare::wall_time time, instant passing) {
    auto r = gpushare::reading_of(usage_of(t));
    const std::lock_guard lock(mutex_);
    auto& row = rows_[t.name()];
    r.requests = row.counts->requests.load(std::memory_order_relaxed);
    r.refusals = row.counts->refusals.load(std::memory_order_relaxed);
    if (!row.meter) {
        row.meter.emplace(t.name());
        row.metered = &t;
    }
    if (row.metered != &t) return;
    if (auto line = row.meter->read(time, passing, r)) unwritten_.push_back(*std::move(line));
}

// Called once a second, at each change, and at the end. The usage of removed tenants is final. No
// bill is ever dropped: if the host has no memory, readings that are missing are made the next
// time.
void service::bill() {
    const std::lock_guard billing(billing_);
    const auto time = std::chrono::time_point_cast<gpushare::ns>(std::chrono::system_clock::now());
    // so that memory is billed even if the time of day is set
    const auto passing = gpushare::host::steady_clock{}.now();
    const auto there = tenants_.all();
    // there is room for each line that was read
    unwritten_.reserve(unwritten_.size() + gone_.size() + there.size());
    for (; !gone_.empty(); gone_.erase(gone_.begin())) {
        const auto& t = gone_.front();
        read_meter(*t, time, passing);
        const std::lock_guard lock(mutex_);
        auto& row = rows_[t->name()];
        if (row.metered != t.get()) continue;
        row.meter.reset();
        row.metered = nullptr;
        row.calls.reset();
    }
    for (const auto& t : there) read_meter(*t, time, passing);
    if (!journal_) return unwritten_.clear();
    // Lines that can't be written are tried again with the next lines.
    if (const auto why = journal_->append_from(unwritten_); why.code != gpushare::errc::none) {
        tell("the journal can't be written: ", to_string(why.code));
        if (unwritten_.size() > options_.kept_lines) sum_by_tenant(unwritten_);
    }
    const std::lock_guard lock(mutex_);
    lines_waiting_ = unwritten_.size();
}

// Reports all of them in one line.
void service::tell_forced() const {
    const auto forced = gate_ == nullptr ? forced_launches{} : gate_->take_forced();
    if (forced.count == 0) return;
    const auto name_of_client = [this](std::uint32_t number) -> std::string {
        const std::lock_guard lock(mutex_);
        for (const auto& [name, row] : rows_)
            if (row.calls != nullptr && row.calls->number() == number) return "tenant '" + name + "'";
        return "a tenant that is gone";
    };
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(forced.held).count();
    auto text = "launches that went since they were held for long: " + std::to_string(forced.count);
    text += "; the last was of " + name_of_client(forced.client) + ", held for " + std::to_string(ms) + " ms";
    if (forced.held_by != forced.client) text += " behind " + name_of_client(forced.held_by);
    tell(text);
}

// Engines and tenants are called without a lock, because their callbacks, for any tenant, may take
// it. A request for a tenant in the meantime wakes the tenant.
void service::let_idle_go() {
    struct candidate {
        std::shared_ptr<tenant> who;
        std::shared_ptr<scratch> room;
        std::vector<std::shared_ptr<lane>> lanes;
    };
    std::vector<candidate> all;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& [name, row] : rows_) {
            if (row.who == nullptr || row.lanes.empty()) continue;
            auto& c = all.emplace_back(candidate{row.who, row.room, {}});
            for (const auto& [model, l] : row.lanes) c.lanes.push_back(l);
        }
    }
    for (const auto& c : all) {
        bool idle = true;
        for (const auto& l : c.lanes) idle = l->let_sleep() && idle;
        const auto was_asleep = [&](bool is) {
            const std::lock_guard lock(mutex_);
            const auto row = rows_.find(c.who->name());
            return row == rows_.end() || row->second.who != c.who || std::exchange(row->second.asleep, is);
        };
        if (was_asleep(idle) || !idle) continue;
        if (c.room != nullptr) (void)c.room->trim();
        // The tenant's pools and caches are given back as well. Allocations are then refused, so
        // the lane knows that it has to wake the tenant.
        if (!c.who->sleep(now(), {}, gpushare::while_asleep::refuse)) (void)was_asleep(false);
    }
}

// For all tenants, because memory that one tenant frees may be lent to another.
void service::let_texts_begin() const {
    for (const auto& l : all_lanes()) l->memory_came();
}

void service::tell(std::string_view what, std::string_view more) noexcept {
    std::fprintf(stderr, "inference_server: %.*s%.*s\n", static_cast<int>(what.size()), what.data(),
                 static_cast<int>(more.size()), more.data());
}

}  // namespace inference_server
