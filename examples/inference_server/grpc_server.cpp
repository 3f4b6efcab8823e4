// SPDX-License-Identifier: Apache-2.0
// gRPC's threads carry bytes. Messages are made of them here, once it is known who sends them, one after the other and in turns by tenant.
// Engines answer by posting to a thread that makes bytes of answers. The only file that includes gRPC.
#include "inference_server/grpc_server.hpp"

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>

#include "inference_server/grpc_protocol.hpp"
#include "inference_server/worker.hpp"
#include "open_inference.grpc.pb.h"

namespace inference_server {

namespace {

using namespace std::chrono_literals;
using context = grpc::CallbackServerContext;
using grpc::StatusCode;

StatusCode code_of(int http) noexcept {
    switch (http) {
        case 400: return StatusCode::INVALID_ARGUMENT;
        case 401: return StatusCode::UNAUTHENTICATED;
        case 404: return StatusCode::NOT_FOUND;
        case 409: return StatusCode::FAILED_PRECONDITION;
        case 413:
        case 429:
        case 507: return StatusCode::RESOURCE_EXHAUSTED;
        case 503: return StatusCode::UNAVAILABLE;
        case 504: return StatusCode::DEADLINE_EXCEEDED;
        default: return StatusCode::INTERNAL;
    }
}

/// Without its words where there is no memory for them.
grpc::Status status_of(context& c, const refused& why) noexcept try {
    if (why.retry_after != 0) c.AddTrailingMetadata("grpc-retry-pushback-ms", std::to_string(1000 * why.retry_after));
    return {code_of(why.status), why.what()};
} catch (...) {
    return {code_of(why.status), {}};
}

/// OK, or why `f` threw.
template <class F>
grpc::Status outcome_of(context& c, F f) noexcept try {
    f();
    return grpc::Status::OK;
} catch (...) {
    return status_of(c, as_refused(std::current_exception()));
}

/// Throws refused (400).
template <class Message>
void read(Message& to, grpc::ByteBuffer from) {
    grpc::ProtoBufferReader bytes(&from);
    if (!bytes.status().ok() || !to.ParseFromZeroCopyStream(&bytes)) throw refused(400, "the message can't be read");
}
template <class Message>
void write(grpc::ByteBuffer& to, const Message& from) {
    bool own = false;
    const auto status = grpc::SerializationTraits<Message>::Serialize(from, &to, &own);
    if (!status.ok()) throw refused(500, status.error_message());
}

// As over HTTP, one thread makes messages of what is as short, and another one of what takes longer.
constexpr std::size_t quick_message = 65'536;

/// So many of a number of things, counted until it goes.
class counted {
public:
    using counter = std::shared_ptr<std::atomic<std::size_t>>;

    counted() = default;
    /// Throws `why` where `most` would be exceeded.
    counted(counter of, std::size_t n, std::size_t most, const refused& why) : of_(std::move(of)), n_(n) {
        if (of_->fetch_add(n, std::memory_order_relaxed) + n <= most) return;
        of_->fetch_sub(n, std::memory_order_relaxed);
        throw refused(why);
    }
    counted(counted&&) noexcept = default;
    counted& operator=(counted&& other) noexcept {
        std::swap(of_, other.of_);
        std::swap(n_, other.n_);
        return *this;
    }
    ~counted() {
        if (of_ != nullptr) of_->fetch_sub(n_, std::memory_order_relaxed);
    }

private:
    counter of_;
    std::size_t n_ = 0;
};

/// A request's message.
struct counted_message {
    counted of_tenant{}, of_all{};
};

}  // namespace

namespace {

using inference::GRPCInferenceService;
template <class S>
using raw_health =
    GRPCInferenceService::WithRawCallbackMethod_ServerLive<GRPCInferenceService::WithRawCallbackMethod_ServerReady<
        GRPCInferenceService::WithRawCallbackMethod_ServerMetadata<S>>>;
template <class S>
using raw_models =
    GRPCInferenceService::WithRawCallbackMethod_ModelReady<GRPCInferenceService::WithRawCallbackMethod_ModelMetadata<
        GRPCInferenceService::WithRawCallbackMethod_ModelConfig<S>>>;
template <class S>
using raw_inference = GRPCInferenceService::WithRawCallbackMethod_ModelInfer<
    GRPCInferenceService::WithRawCallbackMethod_ModelStreamInfer<S>>;
template <class S>
using raw_repository = GRPCInferenceService::WithRawCallbackMethod_RepositoryIndex<
    GRPCInferenceService::WithRawCallbackMethod_RepositoryModelLoad<
        GRPCInferenceService::WithRawCallbackMethod_RepositoryModelUnload<S>>>;
/// gRPC reads no message by itself: it would for anybody, and 64 MiB of empty ones are gigabytes when they are read.
using raw_service = raw_health<raw_models<raw_inference<raw_repository<GRPCInferenceService::Service>>>>;

using grpc::ByteBuffer;

}  // namespace

struct grpc_server::shell final : raw_service {
    shell(service& s, grpc_options o) : of(s), options(std::move(o)) {}

    [[nodiscard]] service::caller caller_of(const context& c) const {
        const auto& all = c.client_metadata();
        const auto value = [&](const char* name) {
            const auto found = all.find(name);
            return found == all.end() ? std::string_view{}
                                      : std::string_view(found->second.data(), found->second.size());
        };
        constexpr std::string_view scheme = "Bearer ";
        const auto bearer = value("authorization");
        return of.authenticate(bearer.starts_with(scheme) ? bearer.substr(scheme.size()) : value("x-api-key"));
    }
    [[nodiscard]] counted_message count(const service::caller& who, std::size_t size) {
        return {
            {{who.counts, &who.counts->uploads},
             size,
             options.max_messages / 2,
             refused(429, "too much is being uploaded with this key", 1)},
            {{self.lock(), &message_bytes}, size, options.max_messages, refused(503, "too much is being uploaded", 1)}};
    }
    /// The sooner one of the request's own and of the call.
    static std::uint64_t timeout(std::chrono::system_clock::time_point deadline, std::uint64_t us) {
        if (deadline == std::chrono::system_clock::time_point::max()) return us;
        const auto left =
            std::chrono::duration_cast<std::chrono::microseconds>(deadline - std::chrono::system_clock::now()).count();
        const auto mine = static_cast<std::uint64_t>(std::max<std::int64_t>(left, 1));
        return us == 0 ? mine : std::min(us, mine);
    }

    template <class F>
    void answer_later(F f) noexcept try {
        answers.later(std::move(f));
    } catch (...) {  // nothing is left to do where there is no memory for that: the call's deadline ends it
    }
    /// `f` gets the request, and what it returns is the answer. It is read on gRPC's thread, whoever asks: it is short.
    template <class Request, class F>
    static grpc::ServerUnaryReactor* at_once(context* c, const ByteBuffer& from, ByteBuffer* to, F f) {
        auto* const reactor = c->DefaultReactor();
        reactor->Finish(outcome_of(*c, [&] { write(*to, f(message<Request>(from, 4096))); }));
        return reactor;
    }
    template <class Request>
    static Request message(const ByteBuffer& from, std::size_t most) {
        if (from.Length() > most) throw refused(413, "the message is too large");
        Request q;
        read(q, from);
        return q;
    }

    grpc::ServerUnaryReactor* ServerLive(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::ServerLiveRequest>(c, *from, to, [](const auto&) {
            inference::ServerLiveResponse r;
            r.set_live(true);
            return r;
        });
    }
    grpc::ServerUnaryReactor* ServerReady(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::ServerReadyRequest>(c, *from, to, [&](const auto&) {
            inference::ServerReadyResponse r;
            r.set_ready(of.ready());
            return r;
        });
    }
    grpc::ServerUnaryReactor* ServerMetadata(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::ServerMetadataRequest>(c, *from, to, [](const auto&) {
            inference::ServerMetadataResponse r;
            write_server_metadata(r);
            return r;
        });
    }
    grpc::ServerUnaryReactor* ModelReady(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::ModelReadyRequest>(c, *from, to, [&](const auto& q) {
            inference::ModelReadyResponse r;
            const auto who = caller_of(*c);
            r.set_ready(of.ready(who, of.model(q.name(), q.version()).name));
            return r;
        });
    }
    grpc::ServerUnaryReactor* ModelMetadata(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::ModelMetadataRequest>(c, *from, to, [&](const auto& q) {
            inference::ModelMetadataResponse r;
            (void)caller_of(*c);
            write_metadata(r, of.model(q.name(), q.version()));
            return r;
        });
    }
    grpc::ServerUnaryReactor* ModelConfig(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::ModelConfigRequest>(c, *from, to, [&](const auto& q) {
            inference::ModelConfigResponse r;
            (void)caller_of(*c);
            write_config(*r.mutable_config(), of.model(q.name(), q.version()));
            return r;
        });
    }
    grpc::ServerUnaryReactor* RepositoryIndex(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::RepositoryIndexRequest>(c, *from, to, [&](const auto& q) {
            inference::RepositoryIndexResponse r;
            for (const auto& m : of.index(caller_of(*c))) {
                if (q.ready() && !m.ready) continue;
                auto& e = *r.add_models();
                e.set_name(m.name);
                e.set_version(std::string(model_version));
                e.set_state(m.ready ? "READY" : "UNAVAILABLE");
                e.set_reason(m.ready ? "" : "not loaded yet");
            }
            return r;
        });
    }
    template <class T>
    static const std::string& model_of(const T& q) {
        return q.model_name().empty() ? q.repository_name() : q.model_name();
    }
    grpc::ServerUnaryReactor* RepositoryModelUnload(context* c, const ByteBuffer* from, ByteBuffer* to) override {
        return at_once<inference::RepositoryModelUnloadRequest>(c, *from, to, [&](const auto& q) {
            inference::RepositoryModelUnloadResponse r;
            of.unload(caller_of(*c), model_of(q));
            r.set_model_name(model_of(q));
            r.set_isunloaded(true);
            return r;
        });
    }
    grpc::ServerUnaryReactor* RepositoryModelLoad(context* c, const ByteBuffer* from, ByteBuffer* to) override;
    grpc::ServerUnaryReactor* ModelInfer(context* c, const ByteBuffer* from, ByteBuffer* to) override;
    grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* ModelStreamInfer(context* c) override;

    /// Of somebody whose key is known, and counted.
    [[nodiscard]] inference::ModelInferRequest infer_message(ByteBuffer from) const {
        grpc::ProtoBufferReader bytes(&from);
        check_lists(bytes, options.max_lists);
        inference::ModelInferRequest q;
        read(q, std::move(from));
        return q;
    }

    service& of;
    const grpc_options options;
    std::atomic<std::size_t> message_bytes{0}, streams{0};
    /// Not gRPC's threads, which have the bytes of all to carry.
    worker& reader_of(std::size_t message) noexcept { return message <= quick_message ? reads : long_reads; }

    std::weak_ptr<shell> self;
    worker reads, long_reads, answers;
    int port = 0;
    std::unique_ptr<grpc::Server> server;  // goes first: it calls the others
};

namespace {

/// A call that is answered from elsewhere, once: with its answer, or because its client is gone.
class pending final : public grpc::ServerUnaryReactor {
public:
    static std::shared_ptr<pending> make() {
        auto p = std::make_shared<pending>();
        p->self_ = p;
        return p;
    }
    /// `f` makes the status, unless the call is over.
    template <class F>
    void answer(F f) {
        if (!answered_.exchange(true)) Finish(f());
    }
    [[nodiscard]] bool is_answered() const noexcept { return answered_; }
    void hold(counted_message m) { held_ = std::move(m); }

private:
    void OnCancel() override {
        answer([] { return grpc::Status::CANCELLED; });
    }
    void OnDone() override { const auto last = std::move(self_); }

    std::shared_ptr<pending> self_;  // until it is done
    std::atomic<bool> answered_{false};
    counted_message held_;
};

}  // namespace

grpc::ServerUnaryReactor* grpc_server::shell::RepositoryModelLoad(context* c, const ByteBuffer* from, ByteBuffer* to) {
    const auto call = pending::make();
    auto* const reactor = call.get();
    const auto status = outcome_of(*c, [&] {
        const auto who = caller_of(*c);
        const auto q = message<inference::RepositoryModelLoadRequest>(*from, quick_message);
        const auto name = model_of(q);
        of.load(who, name, [call, c, to, name](const refused* why) {
            call->answer([&] {
                if (why != nullptr) return status_of(*c, *why);
                return outcome_of(*c, [&] {
                    inference::RepositoryModelLoadResponse r;
                    r.set_model_name(name);
                    r.set_isloaded(true);
                    write(*to, r);
                });
            });
        });
    });
    if (!status.ok()) call->answer([&] { return status; });
    return reactor;
}

grpc::ServerUnaryReactor* grpc_server::shell::ModelInfer(context* c, const ByteBuffer* from, ByteBuffer* to) {
    const auto call = pending::make();
    auto* const reactor = call.get();
    const auto status = outcome_of(*c, [&] {
        const auto who = caller_of(*c);
        call->hold(count(who, from->Length()));
        // On whichever thread: of the call only what can't be over, or answer() gives.
        auto infer = [this, call, c, to, who, bytes = *from, deadline = c->deadline()] {
            const auto q = infer_message(bytes);
            const auto& name = of.model(q.model_name(), q.model_version()).name;
            auto r = read_infer(q);
            r.timeout_us = timeout(deadline, r.timeout_us);
            auto asked = r.outputs;
            of.infer(who, name, std::move(r), [call, c, to, asked, me = self.lock()](answer a) mutable {
                me->answer_later([call, c, to, asked = std::move(asked), a = std::move(a)] {
                    call->answer([&] {
                        if (const auto* why = std::get_if<refused>(&a)) return status_of(*c, *why);
                        return outcome_of(*c, [&] {
                            inference::ModelInferResponse m;
                            write_infer(m, std::get<infer_response>(a), asked);
                            write(*to, m);
                        });
                    });
                });
            });
        };
        reader_of(from->Length())
            .later(
                [call, c, infer = std::move(infer)] {
                    if (call->is_answered()) return;
                    try {
                        infer();
                    } catch (...) {
                        call->answer([&] { return status_of(*c, as_refused(std::current_exception())); });
                    }
                },
                who.counts.get());
    });
    if (!status.ok()) call->answer([&] { return status; });
    return reactor;
}

namespace {

using shell = grpc_server::shell;
using stream_reactor = grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>;

/// A stream: one request after the other, each with one answer or with a token each. The next one is read when the last one is
/// answered, and the next piece of a text made when the last one is written: who reads slowly is waited for.
class stream_call final : public stream_reactor {
public:
    static stream_call* begin(std::shared_ptr<shell> of, context* c) {
        auto s = std::shared_ptr<stream_call>(new stream_call(std::move(of), c));
        s->self_ = s;
        s->open();
        return s.get();
    }

private:
    stream_call(std::shared_ptr<shell> of, context* c) : shell_(std::move(of)), context_(c) {}

    void open() {
        const auto status = outcome_of(*context_, [&] {
            (void)shell_->caller_of(*context_);
            open_ = {{shell_, &shell_->streams},
                     1,
                     shell_->options.max_streams,
                     refused(503, "too many streams are open", 1)};
        });
        if (status.ok()) return step();
        over_ = true;
        Finish(status);
    }

    // Begins what comes next, unless something is under way: then whoever ends that asks again.
    void step() {
        enum class next : std::uint8_t { read, write, piece, finish } what{};
        {
            const std::lock_guard lock(mutex_);
            if (over_ || busy_) return;
            if (gone_ || (!reads_ && waiting_.empty() && !at_work_ && text_ == nullptr)) {
                over_ = true;
                what = next::finish;
            } else if (!waiting_.empty()) {
                busy_ = true;
                writing_ = std::move(waiting_.front());
                waiting_.pop_front();
                what = next::write;
            } else if (at_work_) {
                return;
            } else if (text_ != nullptr) {
                busy_ = at_work_ = true;
                what = next::piece;
            } else {
                busy_ = true;
                what = next::read;
            }
        }
        switch (what) {
            case next::read: return StartRead(&bytes_);
            case next::write: return StartWrite(&writing_);
            case next::piece: return make_piece();
            case next::finish: return Finish(gone_ ? grpc::Status::CANCELLED : grpc::Status::OK);
        }
    }
    void OnReadDone(bool ok) override {
        {
            const std::lock_guard lock(mutex_);
            reads_ = ok;
            at_work_ = ok;
        }
        if (!ok) return not_busy();
        id_.clear();
        try {
            const auto who = shell_->caller_of(*context_);  // a key may be gone meanwhile
            held_ = shell_->count(who, bytes_.Length());
            shell_->reader_of(bytes_.Length()).later([self = self_, who] { self->serve(who); }, who.counts.get());
        } catch (...) {
            bytes_ = {};
            fail(std::current_exception());
            not_busy();
        }
    }
    void OnWriteDone(bool ok) override {
        if (!ok) gone_ = true;
        not_busy();
    }
    void not_busy() {
        {
            const std::lock_guard lock(mutex_);
            busy_ = false;
        }
        step();
    }
    void OnCancel() override {
        gone_ = true;
        step();
    }
    void OnDone() override { const auto last = std::move(self_); }

    // ---- a request

    void serve(const service::caller& who) {
        try {
            begin_request(who);
        } catch (...) {
            fail(std::current_exception());
        }
        not_busy();
    }
    void begin_request(const service::caller& who) {
        const auto q = shell_->infer_message(std::exchange(bytes_, {}));
        id_ = q.id();
        model_ = &shell_->of.model(q.model_name(), q.model_version());
        const auto wants = q.parameters().find("triton_enable_empty_final_response");
        empty_end_ = wants != q.parameters().end() && wants->second.bool_param();
        auto r = read_infer(q);
        if (model_->streams) {
            check_inputs(*model_, r);
            auto text = shell_->of.generate(who, model_->name, read_generate(q, r));
            const std::lock_guard lock(mutex_);
            text_ = std::move(text);
            at_work_ = false;
            return;
        }
        r.timeout_us = shell::timeout(context_->deadline(), r.timeout_us);
        auto asked = r.outputs;
        shell_->of.infer(who, model_->name, std::move(r), [self = self_, asked](answer a) mutable {
            self->shell_->answer_later(
                [self, asked = std::move(asked), a = std::move(a)] { self->answered(a, asked); });
        });
    }
    void answered(const answer& a, const std::vector<requested_output>& asked) noexcept try {
        if (const auto* why = std::get_if<refused>(&a)) return end(why->what());
        inference::ModelStreamInferResponse r;
        write_infer(*r.mutable_infer_response(), std::get<infer_response>(a), asked);
        mark_final(r);
        end({}, bytes_of(r));
    } catch (...) {
        fail(std::current_exception());
    }
    void make_piece() {
        try {
            ask_for_piece();
        } catch (...) {
            fail(std::current_exception());
        }
        not_busy();
    }
    void ask_for_piece() {
        constexpr std::uint32_t tokens = 8;
        const auto text = text_;  // an end that comes at once lets go of the other one
        text->more(
            tokens,
            [self = self_](std::string token) {
                self->shell_->answer_later([self, token = std::move(token)] { self->add_token(token); });
                return !self->gone_;
            },
            [self = self_](token_stream::end e) {
                self->shell_->answer_later([self, e = std::move(e)] { self->piece_ended(e); });
            });
    }
    void add_token(const std::string& token) noexcept try {
        inference::ModelStreamInferResponse r;
        write_token(*r.mutable_infer_response(), *model_, id_, token);
        add(r);
    } catch (...) {
        fail(std::current_exception());
    }
    void piece_ended(const token_stream::end& e) noexcept try {
        if (e.why) return end(e.why->what());
        if (e.last && empty_end_) {
            inference::ModelStreamInferResponse r;
            write_head(*r.mutable_infer_response(), *model_, id_);
            mark_final(r);
            return end({}, bytes_of(r));
        }
        if (e.last) return end({});
        {
            const std::lock_guard lock(mutex_);
            at_work_ = false;
        }
        step();
    } catch (...) {
        fail(std::current_exception());
    }
    static void mark_final(inference::ModelStreamInferResponse& r) {
        (*r.mutable_infer_response()->mutable_parameters())["triton_final_response"].set_bool_param(true);
    }
    static ByteBuffer bytes_of(const inference::ModelStreamInferResponse& r) {
        ByteBuffer b;
        write(b, r);
        return b;
    }
    void add(const inference::ModelStreamInferResponse& r) {
        auto bytes = bytes_of(r);
        {
            const std::lock_guard lock(mutex_);
            waiting_.push_back(std::move(bytes));
        }
        step();
    }
    /// The request is answered by an error; the whole stream ends where there is no memory for that.
    void fail(const std::exception_ptr& why) noexcept {
        try {
            end(as_refused(why).what());
        } catch (...) {
            gone_ = true;
            step();
        }
    }
    /// The request is answered: by what went before, `last` or an error.
    void end(const std::string& error, std::optional<ByteBuffer> last = {}) {
        if (!error.empty()) {
            inference::ModelStreamInferResponse r;
            r.set_error_message(error);
            r.mutable_infer_response()->set_id(id_);
            last = bytes_of(r);
        }
        decltype(text_) over;  // it tells its lane when it goes: not under the lock
        {
            const std::lock_guard lock(mutex_);
            if (last) waiting_.push_back(*std::move(last));
            over.swap(text_);
            held_ = {};
            at_work_ = false;
        }
        step();
    }

    const std::shared_ptr<shell> shell_;
    context* const context_;
    std::shared_ptr<stream_call> self_;  // until it is done
    counted open_;
    counted_message held_;
    ByteBuffer bytes_;                   // the request, until it is read
    const model_info* model_ = nullptr;  // of the request, as the next two
    std::string id_;
    bool empty_end_ = false;

    std::mutex mutex_;
    std::deque<ByteBuffer> waiting_;
    ByteBuffer writing_;
    std::shared_ptr<token_stream> text_;
    // gRPC reads or writes, or a thread is in serve() or make_piece(), or asked to be: it isn't ended meanwhile.
    bool busy_ = false;
    bool at_work_ = false;  // an engine
    bool reads_ = true;     // the client has more to say, perhaps
    bool over_ = false;
    std::atomic<bool> gone_{false};
};

}  // namespace

grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* grpc_server::shell::ModelStreamInfer(context* c) {
    return stream_call::begin(self.lock(), c);
}

grpc_server::grpc_server(service& s, grpc_options o) : shell_(std::make_shared<shell>(s, std::move(o))) {
    shell_->self = shell_;
    const auto& options = shell_->options;
    const auto ms = [](std::chrono::milliseconds t) { return static_cast<int>(t.count()); };
    // It has a line for each text that isn't UTF-8: whoever asks could fill the log.
    google::protobuf::SetLogHandler(nullptr);
    grpc::ServerBuilder builder;
    builder.AddListeningPort(options.address + ":" + std::to_string(options.port), grpc::InsecureServerCredentials(),
                             &shell_->port);
    builder.RegisterService(shell_.get());
    builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message));
    builder.SetResourceQuota(grpc::ResourceQuota("server").Resize(options.max_buffers));
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(options.max_metadata));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_calls_of_connection);
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, ms(options.handshake_timeout));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, ms(options.idle_timeout));
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second server is told so
    shell_->server = builder.BuildAndStart();
    if (shell_->server == nullptr || shell_->port == 0)
        throw std::runtime_error("cannot listen on " + options.address + ":" + std::to_string(options.port));
}

grpc_server::~grpc_server() { stop(0ms); }

std::uint16_t grpc_server::port() const noexcept { return static_cast<std::uint16_t>(shell_->port); }

void grpc_server::stop(std::chrono::milliseconds patience) {
    shell_->server->Shutdown(std::chrono::system_clock::now() + patience);  // returns when all calls are over
    shell_->reads.stop();
    shell_->long_reads.stop();
    shell_->answers.stop();
}

}  // namespace inference_server
