// SPDX-License-Identifier: Apache-2.0
// The server without its protocols: tenants from a file that is read again when it changes, their
// models, and their bills. The protocols' shells call the service from their threads, and it calls
// them back.
//
//   service s{{.tenants = "tenants.conf", .journal = "usage"}, {tiny_mlp(), tiny_letters()}};
//   const auto who = s.authenticate(key);                                     // throws refused
//   s.infer(who, "mlp", parse_infer(body, {}), [](answer a) { ... });
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/observe/timeline_trace.hpp>
#include <gpushare/serving/usage_journal.hpp>
#include <gpushare/tenant/tenant_directory.hpp>

#include "inference_server/call_gate.hpp"
#include "inference_server/lane.hpp"
#include "inference_server/read_file.hpp"
#include "inference_server/tenants_file.hpp"
#include "inference_server/worker.hpp"

namespace inference_server {

struct service_options {
    std::string tenants{};  ///< the file of tenants; see tenants_file.hpp
    std::string journal{};  ///< the journal of usage; empty for none
    node_options node = usual_node();
    std::chrono::milliseconds idle_after{
        /// After this time without a request, a model's weights are given back, and its caches
        /// after a quarter of the time.
        60'000};
    /// No model sleeps if it is known to take longer than this to load; 0 means no limit.
    std::chrono::milliseconds wake_within{0};
    /// The longest wait for the work of a tenant or a model that a reload removes.
    std::chrono::milliseconds closes_within{5'000};
    /// The longest wait for memory of a text's cache.
    std::chrono::milliseconds text_waits{30'000};
    /// Makes a tenant's model from its words in the file of tenants, as onnx_models.hpp does.
    /// Checks as much as possible before the first request, and throws errors of engines and
    /// models. Empty if the server was built without such engines.
    std::function<model_source(const model_setting&, const std::string& path)> model_of{};
    /// The maximum number of lines to keep for a journal that can't be written. Further lines are
    /// summed for each tenant.
    std::size_t kept_lines = 10'000;
    call_gate_options gate{};  ///< on CUDA: how launches are held
};

class service {
public:
    /// The client of a request. Like everything that a service hands out, it must be destroyed
    /// before the service.
    struct caller {
        std::shared_ptr<tenant> who{};
        std::shared_ptr<account> counts{};
        // set when its key is gone from the file
        std::shared_ptr<const std::atomic<bool>> revoked{};
        [[nodiscard]] bool is_revoked() const noexcept {
            return revoked != nullptr && revoked->load(std::memory_order_relaxed);
        }
    };

    /// Throws std::runtime_error or gpushare::error if the file of tenants can't be read or a
    /// tenant can't be admitted, and model_setting_error if a model can't be served.
    service(service_options o, std::vector<model_source> models);
    service(const service&) = delete;
    service& operator=(const service&) = delete;
    /// Waits until calls and loads have ended, however long they take, because nothing can end an
    /// engine's thread, and the memory that it uses must stay. A program that can't wait calls
    /// stop() first, and then ends by leave(). While the host has no memory, the destructor tries
    /// again; after a second without memory it goes on without the last bill.
    ~service();

    /// Throws refused (401). Takes the same time however many keys there are, and doesn't wait for
    /// other calls.
    [[nodiscard]] caller authenticate(std::string_view key);
    /// One of the server's models, or of the caller's own. Never null. Throws refused (404).
    [[nodiscard]] std::shared_ptr<const model_source> model(const caller& c, std::string_view name,
                                                            std::string_view version = {}) const;

    /// Throws refused, or answers.
    void infer(const caller& c, std::string_view model, infer_request r, on_answer reply);
    [[nodiscard]] std::shared_ptr<token_stream> generate(const caller& c, std::string_view model, generate_request r);
    /// Calls `done` with null once the model is loaded.
    void load(const caller& c, std::string_view model, std::function<void(const refused*)> done);
    void unload(const caller& c, std::string_view model);
    [[nodiscard]] bool ready(const caller& c, std::string_view model);
    /// A model in the index. A model that isn't ready has a reason that isn't empty.
    struct index_entry {
        std::string name;
        bool ready = false;
    };
    [[nodiscard]] std::vector<index_entry> index(const caller& c);

    /// Whether the service takes requests: the device is there, no protocol is shut, and the
    /// service isn't draining.
    [[nodiscard]] bool ready() const;
    /// Says that a protocol takes no connections for a while, or takes connections again.
    void shut(bool is) noexcept { shut_.fetch_add(is ? 1 : -1, std::memory_order_relaxed); }
    /// Takes no new requests, and waits until the existing requests have been answered. Returns
    /// false at the deadline, or when `hurry` is requested.
    bool drain(gpushare::instant deadline, const std::stop_token& hurry = {});
    /// A call, a text's piece or a load that hasn't ended.
    struct running {
        std::string tenant, model;
    };
    /// Takes no new requests, refuses those that wait, waits until calls and loads have ended, and
    /// writes the last bills. Returns the calls and loads that still run at the deadline, or when
    /// `hurry` is requested. The service then only continues these. It bills them once a later
    /// call, or the destructor, has waited for them; it doesn't bill calls of a tenant that a
    /// reload has removed.
    [[nodiscard]] std::vector<running> stop(gpushare::instant deadline, const std::stop_token& hurry = {});

    /// The tenant's usage so far, with the device time for which it is billed.
    [[nodiscard]] gpushare::tenant_usage usage_of(tenant& t) const;
    /// How long the tenant's launches took. A launch that fills a tenth of the device counts in
    /// full here, although only a tenth of it is billed. Without a gate, this is the billed time.
    [[nodiscard]] gpushare::ns launch_time_of(tenant& t) const;
    /// Whether launches pass a gate, and how many threads are held at it in the middle of a call.
    [[nodiscard]] bool gates_launches() const noexcept { return gate_ != nullptr; }
    [[nodiscard]] std::size_t held_calls() const noexcept { return gate_ == nullptr ? 0 : gate_->held(); }

    /// For operators.
    [[nodiscard]] std::string metrics();
    [[nodiscard]] std::string status_json();
    /// The timeline of all work, for Perfetto, recorded from the first call on.
    [[nodiscard]] std::string timeline_json();
    /// Reads the file of tenants again, now. Returns the error, or an empty text. May wait some
    /// seconds for the work of tenants that are gone. A file that can't be read, or has an invalid
    /// line, changes nothing. Throws std::bad_alloc if the host has no memory; the file is then
    /// read again a second later.
    std::string reload();
    /// Gets the error, as reload() returns it. Exceptions of the function are dropped.
    using on_reload = std::function<void(std::string_view)>;
    /// Calls reload() in another thread, which first waits until the file has been written. Calls
    /// `done` exactly once, even at the end of the service or if the host has no memory. Throws
    /// std::bad_alloc; the function is then not called.
    void reload_soon(on_reload done);
    [[nodiscard]] gpushare::instant now() const { return shared_.now(); }
    [[nodiscard]] server_node& node() noexcept { return node_; }

private:
    /// A tenant's own model, and the setting from which it was made.
    struct own_model {
        model_setting setting{};
        file_look look{};  // of its file
        std::shared_ptr<const model_source> source{};
    };
    using own_models = std::vector<std::shared_ptr<const own_model>>;

    struct tenant_row {
        // stays when the tenant goes and comes back
        std::shared_ptr<account> counts = std::make_shared<account>();
        // The other members belong to the current tenant. They are empty while it is being closed.
        std::shared_ptr<tenant> who;
        std::shared_ptr<scratch> room;
        // if there is a gate; stays until the tenant's last bill
        std::shared_ptr<tenant_calls> calls;
        std::map<std::string, std::shared_ptr<lane>, std::less<>> lanes;  // by model
        own_models models;
        std::optional<gpushare::usage_meter> meter;
        // the tenant that the meter measures: a predecessor until its last bill is made
        const tenant* metered = nullptr;
        bool asleep = false;
    };

    /// The keys of the file that is in force.
    struct key_ring {
        struct entry {
            caller who{};
            std::shared_ptr<std::atomic<bool>> revoked{};
        };
        tenants_file file{};
        std::vector<entry> entries{};  // in the order of the keys in the file
    };
    [[nodiscard]] std::shared_ptr<const key_ring> keys() const {
        const std::lock_guard lock(keys_mutex_);
        return keys_;
    }
    void revoke_gone(const tenants_file& next) const;
    void refuse_new();
    /// The two halves of stop().
    std::vector<running> end_calls(gpushare::instant deadline, const std::stop_token& hurry);
    void last_bill();
    [[nodiscard]] std::vector<std::shared_ptr<lane>> lanes_at_end() const;
    void close_all(const std::vector<std::shared_ptr<lane>>& lanes, gpushare::instant deadline);
    void make_room(std::vector<std::shared_ptr<lane>>& leaving, std::size_t more);
    [[nodiscard]] std::shared_ptr<const key_ring> ring_of(tenants_file next);

    [[nodiscard]] std::shared_ptr<lane> lane_of(const caller& c, std::string_view model);
    [[nodiscard]] std::vector<std::shared_ptr<lane>> lanes_of(std::string_view whose) const;
    [[nodiscard]] std::shared_ptr<tenant_calls> calls_of(const tenant& t) const;
    [[nodiscard]] std::vector<std::shared_ptr<lane>> all_lanes() const;
    /// Runs a function on the thread for slow work.
    void later(std::function<void()> f, const void* whose);
    void keep_house(const std::stop_token& stop);
    static void answer_all(const std::vector<on_reload>& asked, std::string_view why) noexcept;
    /// A request's time ends at `when`; tell_late() then handles the request.
    void expect_late(gpushare::instant when) noexcept;
    void tell_late(const std::stop_token& stop);
    void reload_if_changed();
    void wait_until_written() const;
    void apply(tenants_file next);
    [[nodiscard]] std::map<std::string, own_models> models_of(const tenants_file& next) const;
    [[nodiscard]] std::shared_ptr<const own_model> made(const model_setting& m) const;
    void close_changed(std::map<std::string, own_models> next, gpushare::instant deadline);
    void close_gone(const tenants_file& next, gpushare::instant deadline);
    void note_gone();
    void bill();
    void read_meter(tenant& t, gpushare::wall_time time, gpushare::instant passing);
    void tell_forced() const;
    void let_idle_go();
    void let_texts_begin() const;
    static void tell(std::string_view what, std::string_view more = "") noexcept;

    const service_options options_;
    const gpushare::sleep_rule rule_;
    const std::vector<std::shared_ptr<const model_source>> models_;
    server_node node_;
    cache_memory cache_memory_;
    server_stream scrubbing_;
    cache_chunks chunks_;
    const std::shared_ptr<std::atomic<std::uint64_t>> freed_ = std::make_shared<std::atomic<std::uint64_t>>(0);
    tenancy shared_;
    gpushare::tenant_directory<server_node> tenants_;
    const std::unique_ptr<call_gate> gate_;
    std::optional<gpushare::usage_journal> journal_;

    mutable std::mutex mutex_;
    std::map<std::string, tenant_row, std::less<>> rows_;
    // lanes that aren't in a row any more, although their work may still run
    std::vector<std::weak_ptr<lane>> outlasting_;
    std::string wrong_;                  // the last error of the file
    std::atomic<bool> draining_{false};  // set under mutex_; strangers may read it without the lock
    // the file of tenants: as it was read, and as it was found after a change
    file_look seen_{}, changed_{};
    std::size_t lines_waiting_ = 0;  // lines that the journal hasn't written
    std::atomic<int> shut_{0};       // protocols that are shut; relaxed: only a count

    // guards only the pointer; never held while a key is looked up
    mutable std::mutex keys_mutex_;
    std::shared_ptr<const key_ring> keys_ = std::make_shared<const key_ring>();

    std::mutex reloading_;  // one file at a time
    // guarded by reloading_: tenants that a reload removes
    std::vector<std::shared_ptr<tenant>> leaving_;
    std::mutex billing_;                         // guards the next two members
    std::vector<std::shared_ptr<tenant>> gone_;  // removed tenants whose last bill isn't made
    std::vector<gpushare::usage_line> unwritten_;
    std::mutex tracing_;
    gpushare::timeline_trace trace_;
    std::optional<gpushare::limiter_trace<tenancy::limiter>> drawn_;

    std::mutex reloads_mutex_;
    std::condition_variable_any reload_comes_;
    std::vector<on_reload> reloads_;  // callers that wait for a reload
    worker loads_;

    std::mutex late_mutex_;
    std::condition_variable_any late_comes_;
    gpushare::instant late_at_ = gpushare::never;  // the earliest deadline of the requests
    std::jthread dispatcher_, housekeeper_, timekeeper_;
};

/// The exit status of a process that ends beside calls that still run.
constexpr int exit_beside_calls = 3;
/// Reports on standard error which calls still run, and ends the process with exit_beside_calls,
/// without any destructor, because destructors would take memory away from the calls.
[[noreturn]] void leave(const std::vector<service::running>& beside) noexcept;

}  // namespace inference_server
