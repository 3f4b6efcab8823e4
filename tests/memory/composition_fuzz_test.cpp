// SPDX-License-Identifier: Apache-2.0
// Random stacks: quotas, pools, caches with and without a stream, private pools, scrubbing, handles
// and statistics on top of each other in any order, for several tenants of one device, driven by
// random calls and compared with a model that knows every block. The device has no memory behind
// its addresses, fails now and then, and counts.
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/composition/any_upstream.hpp"
#include "support/manual_timeline.hpp"
#include "support/random.hpp"

namespace composition_fuzz_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;
using gpushare::instant;
using gpushare::quota;
using support::any_upstream;
using support::upstream_of;

namespace {

constexpr std::size_t step = 256, capacity = 1 << 20;

/// Addresses, of which one that comes back is given again for as big a block.
class paper_device : public any_upstream {
public:
    void* try_allocate(std::size_t size, std::size_t alignment, failure* why) noexcept override {
        const auto takes = charged(size, alignment).count();
        if (takes > capacity - used_ || (fail_ != 0 && --fail_ == 0)) {
            if (why != nullptr) *why = {.code = errc::out_of_memory, .asked = takes, .limit = capacity};
            return nullptr;
        }
        used_ += takes;
        auto& free = free_[{takes, alignment}];
        std::uintptr_t at = 0;
        if (free.empty()) {
            at = (next_ + alignment - 1) & ~(alignment - 1);
            next_ = at + takes;
        } else {
            at = free.back();
            free.pop_back();
        }
        out_[at] = {size, alignment};
        return reinterpret_cast<void*>(at);
    }
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept override {
        const auto found = out_.find(reinterpret_cast<std::uintptr_t>(p));
        if (found == out_.end() || found->second != std::pair{size, alignment}) {
            ++wrong_;
            return found == out_.end() ? errc::unknown_block : errc::wrong_size;
        }
        const auto takes = charged(size, alignment).count();
        used_ -= takes;
        free_[{takes, alignment}].push_back(found->first);
        out_.erase(found);
        return errc::none;
    }
    bytes charged(std::size_t size, std::size_t alignment) const noexcept override {
        if (!std::has_single_bit(alignment) || size > (std::size_t{1} << 40)) return bytes::max();
        return bytes{(std::max<std::size_t>(size, 1) + step - 1) / step * step};
    }
    failure refuses(std::size_t size, std::size_t alignment) const noexcept override {
        if (charged(size, alignment) <= bytes{capacity}) return {};
        return {.code = errc::out_of_memory, .asked = size, .limit = capacity};
    }
    bytes largest_free() const noexcept override { return bytes::max(); }
    std::string_view owner() const noexcept override { return {}; }
    gpushare::close_token closing() const noexcept override { return {}; }

    void fail_the(std::uint64_t nth) { fail_ = nth; }
    [[nodiscard]] std::uint64_t used() const { return used_; }
    [[nodiscard]] std::uint64_t wrong() const { return wrong_; }

private:
    std::uintptr_t next_ = 1 << 20;
    std::uint64_t used_ = 0, fail_ = 0, wrong_ = 0;
    std::map<std::pair<std::uint64_t, std::size_t>, std::vector<std::uintptr_t>> free_;
    std::unordered_map<std::uintptr_t, std::pair<std::size_t, std::size_t>> out_;
};

/// What scrubs it: nothing is written.
class paper_stream {
public:
    using point = support::manual_point;
    static void fill(void* /*at*/, std::byte /*value*/, std::size_t /*size*/) {}
    static void wait(const point& /*p*/) {}
    [[nodiscard]] point record() { return line_.record(); }
    void reach_all() { line_.reach_all(); }

private:
    support::manual_stream line_;
};
static_assert(gpushare::scrubber<paper_stream>);

class layer {
public:
    layer() = default;
    layer(const layer&) = delete;
    layer& operator=(const layer&) = delete;
    virtual ~layer() = default;
    [[nodiscard]] virtual any_upstream& top() = 0;
    /// Gives back what is kept.
    virtual void settle() {}
    /// Gives back what is set aside, too: nothing is asked of it any more.
    virtual void finish() {}
};
template <class R>
class layer_of : public layer {
public:
    template <class... Args>
    explicit layer_of(Args&&... args) : resource_(std::forward<Args>(args)...) {}
    any_upstream& top() override { return erased_; }

protected:
    R resource_;
    upstream_of<R> erased_{resource_};
};

class pool_layer : public layer_of<gpushare::pool_resource<any_upstream>> {
public:
    pool_layer(any_upstream& on, const gpushare::pool_options& o) : layer_of(on, o) {}
    void settle() override { (void)resource_.trim({}); }
};
class cache_layer : public pool_layer {
public:
    cache_layer(any_upstream& on, const gpushare::pool_options& o)
        : pool_layer(on, o), cache_(resource_.make_cache()) {}
    any_upstream& top() override { return erased_cache_; }

private:
    gpushare::pool_resource<any_upstream>::cache cache_;
    upstream_of<gpushare::pool_resource<any_upstream>::cache> erased_cache_{cache_};
};
/// Frees are in the order of a stream.
class ordered_layer : public layer_of<gpushare::pool_resource<any_upstream, paper_stream::point>> {
public:
    ordered_layer(any_upstream& on, const gpushare::pool_options& o, paper_stream& s)
        : layer_of(on, o), stream_(&s), cache_(resource_.make_cache(s)), erased_cache_(*cache_) {}
    ~ordered_layer() override {
        cache_.reset();  // records a last point
        stream_->reach_all();
    }
    any_upstream& top() override { return erased_cache_; }
    void settle() override {
        cache_->flush();
        stream_->reach_all();
        (void)resource_.collect();
        (void)resource_.trim({});
    }

private:
    using cache = gpushare::pool_resource<any_upstream, paper_stream::point>::cache;
    paper_stream* stream_;
    std::optional<cache> cache_;
    upstream_of<cache> erased_cache_;
};
/// Everything is set aside from the beginning, or what a pool holds.
class private_layer : public pool_layer {
public:
    private_layer(any_upstream& on, const gpushare::pool_options& o, bytes reserve) : pool_layer(on, o) {
        try {
            erased_own_.emplace(own_.emplace(resource_, reserve));
        } catch (const gpushare::error&) {  // there isn't so much: the pool alone
        }
    }
    any_upstream& top() override { return erased_own_ ? *erased_own_ : pool_layer::top(); }
    void finish() override {
        own_.reset();
        settle();
    }

private:
    using own = gpushare::private_pool<gpushare::pool_resource<any_upstream>>;
    std::optional<own> own_;
    std::optional<upstream_of<own>> erased_own_;
};
/// Blocks by their handles, which only their owner has.
class handle_layer : public layer, private any_upstream {
public:
    handle_layer(gpushare::handle_table& table, gpushare::tenant_tag whose, any_upstream& on)
        : on_(&on), resource_(table, whose, on) {}
    any_upstream& top() override { return *this; }

private:
    void* try_allocate(std::size_t size, std::size_t alignment, failure* why) noexcept override {
        const auto made = resource_.try_allocate(size, alignment);
        if (!made) {
            if (why != nullptr) *why = made.why();
            return nullptr;
        }
        void* const p = resource_.pointer(*made);
        out_[p] = *made;
        return p;
    }
    errc deallocate(void* p, std::size_t /*size*/, std::size_t /*alignment*/) noexcept override {
        const auto found = out_.find(p);
        if (found == out_.end()) return errc::unknown_block;
        const auto handle = found->second;
        out_.erase(found);
        const errc why = resource_.deallocate(handle);
        return resource_.deallocate(handle) == errc::unknown_block ? why : errc::backend_failed;  // a second time
    }
    bytes charged(std::size_t size, std::size_t alignment) const noexcept override {
        return on_->charged(size, alignment);
    }
    failure refuses(std::size_t size, std::size_t alignment) const noexcept override {
        return on_->refuses(size, alignment);
    }
    bytes largest_free() const noexcept override { return on_->largest_free(); }
    std::string_view owner() const noexcept override { return on_->owner(); }
    gpushare::close_token closing() const noexcept override { return on_->closing(); }

    any_upstream* on_;
    gpushare::handle_resource<any_upstream> resource_;
    std::unordered_map<void*, gpushare::block_handle> out_;
};
class scrub_layer : public layer_of<gpushare::scrubbing_resource<any_upstream, paper_stream>> {
public:
    scrub_layer(any_upstream& on, paper_stream& s) : layer_of(on, s), stream_(&s) {}
    ~scrub_layer() override { settle(); }
    void settle() override {
        stream_->reach_all();
        (void)resource_.collect();
    }

private:
    paper_stream* stream_;
};
using quota_layer = layer_of<gpushare::quota_resource<any_upstream>>;
/// A quota that is credited once what is below has scrubbed.
class scrubbed_layer : public layer {
public:
    scrubbed_layer(quota& limit, any_upstream& on, paper_stream& s)
        : stream_(&s), below_(on, s), resource_(limit, below_) {}
    ~scrubbed_layer() override { settle(); }
    any_upstream& top() override { return erased_; }
    void settle() override {
        stream_->reach_all();
        (void)below_.collect();
    }

private:
    using scrubbing = gpushare::scrubbing_resource<any_upstream, paper_stream>;
    paper_stream* stream_;
    scrubbing below_;
    gpushare::quota_resource<scrubbing> resource_;
    upstream_of<gpushare::quota_resource<scrubbing>> erased_{resource_};
};

struct block {
    std::size_t size = 0, alignment = 0;
    std::size_t branch = 0;
};

/// What one tenant has: quotas of a tree, and what stands on them.
struct branch {
    std::vector<std::unique_ptr<quota>> quotas;  // parents first
    std::vector<std::unique_ptr<layer>> layers;  // the lowest first
    std::string made_of;
    bool closed = false;
    bool checks = true;  // frees, before anything is done with the block
    bool fixed = false;  // it has what was set aside, whatever it is promised

    ~branch() {
        while (!layers.empty()) layers.pop_back();
        while (!quotas.empty()) quotas.pop_back();
    }
    [[nodiscard]] any_upstream& top() const { return layers.back()->top(); }
    void settle() const {
        for (auto l = layers.rbegin(); l != layers.rend(); ++l) (*l)->settle();
    }
};

class world {
public:
    world(std::uint64_t seed, std::uint64_t operations) : any_(seed), operations_(operations) {
        const auto count = 1 + any_.below(3);
        for (std::uint64_t i = 0; i < count; ++i) build(capacity / count);
    }

    /// What went wrong first; empty if nothing did.
    std::string run() {
        for (std::uint64_t i = 0; i < operations_ && wrong_.empty(); ++i) act();
        for (std::size_t b = 0; b < branches_.size(); ++b) {
            empty(b);
            for (auto l = branches_[b]->layers.rbegin(); l != branches_[b]->layers.rend(); ++l) (*l)->finish();
            empty(b);
        }
        for (const auto& b : branches_)
            if (!b->closed) check(b->quotas.front()->usage().current == bytes{}, "bytes are charged for no block", *b);
        const bool any_closed = std::ranges::any_of(branches_, [](const auto& b) { return b->closed; });
        branches_.clear();
        if (!any_closed && device_.used() != 0 && wrong_.empty()) wrong_ = "the device hasn't all back";
        if (root_.usage().current != bytes{} && !any_closed && wrong_.empty()) wrong_ = "the root hasn't all back";
        if (device_.wrong() != wrong_frees_ && wrong_.empty()) wrong_ = "a wrong free has come to the device";
        return wrong_;
    }

private:
    void build(std::size_t share) {
        auto b = std::make_unique<branch>();
        any_upstream* on = &device_;
        quota* parent = &root_;
        const auto guaranteed = bytes{share / step / 2 * step};
        const auto add_quota = [&](bool scrubs) {
            const bool first = b->quotas.empty();
            b->quotas.push_back(
                std::make_unique<quota>(*parent, first ? guaranteed : bytes{}, first ? bytes{share} : guaranteed));
            parent = b->quotas.back().get();
            if (scrubs)
                b->layers.push_back(std::make_unique<scrubbed_layer>(*parent, *on, stream_));
            else
                b->layers.push_back(std::make_unique<quota_layer>(*parent, *on));
            b->made_of += scrubs ? " quota-over-scrubbing" : " quota";
            b->checks = b->checks && !scrubs;
            on = &b->layers.back()->top();
        };
        add_quota(any_.one_in(4));
        for (auto more = any_.below(5); more != 0; --more) {
            const gpushare::pool_options options{.segment = bytes{step << any_.below(9)},
                                                 .kept = bytes{step << any_.below(9)},
                                                 .part = static_cast<std::uint32_t>(any_.below(3) * 4)};
            switch (any_.below(9)) {
                case 0:
                    b->checks = true;
                    b->layers.push_back(std::make_unique<pool_layer>(*on, options));
                    b->made_of += " pool";
                    break;
                case 1:
                    b->checks = true;
                    b->layers.push_back(std::make_unique<cache_layer>(*on, options));
                    b->made_of += " cache";
                    break;
                case 2:
                    b->checks = false;
                    b->layers.push_back(std::make_unique<scrub_layer>(*on, stream_));
                    b->made_of += " scrubbing";
                    break;
                case 3:
                    b->checks = true;
                    b->layers.push_back(std::make_unique<layer_of<gpushare::statistics_resource<any_upstream>>>(*on));
                    b->made_of += " statistics";
                    break;
                case 4:
                    b->checks = true;
                    b->layers.push_back(std::make_unique<ordered_layer>(*on, options, stream_));
                    b->made_of += " stream-ordered";
                    break;
                case 5:
                    b->checks = b->fixed = true;
                    b->layers.push_back(std::make_unique<private_layer>(
                        *on, options, bytes{1 + any_.below(static_cast<std::uint64_t>(share) / 4)}));
                    b->made_of += " private";
                    break;
                case 6:
                    b->checks = false;
                    b->layers.push_back(std::make_unique<handle_layer>(
                        handles_, gpushare::tenant_tag{static_cast<std::uint32_t>(branches_.size())}, *on));
                    b->made_of += " handles";
                    break;
                default:
                    if (b->quotas.size() < 3) add_limit(*b, *on);
            }
            on = &b->layers.back()->top();
        }
        branches_.push_back(std::move(b));
    }
    // A quota that isn't in the tree of the first: a limit of its own, further up.
    void add_limit(branch& b, any_upstream& on) {
        b.quotas.push_back(std::make_unique<quota>(bytes{capacity}));
        b.layers.push_back(std::make_unique<quota_layer>(*b.quotas.back(), on));
        b.made_of += " limit";
    }

    void act() {
        const std::size_t at = any_.below(branches_.size());
        branch& b = *branches_[at];
        const auto roll = any_.below(1000);
        if (roll < 520)
            allocate(at);
        else if (roll < 947)
            free_one();
        else if (roll < 950)
            free_wrongly();
        else if (roll < 965)
            b.settle();
        else if (roll < 975)
            stream_.reach_all();
        else if (roll < 985)
            device_.fail_the(1 + any_.below(3));
        else if (roll < 992)
            resize(b);
        else if (roll < 999)
            have_all(at);
        else if (any_.one_in(4))
            close(at);
        look(b);
    }

    void allocate(std::size_t at) {
        branch& b = *branches_[at];
        const std::size_t size = any_.below(std::size_t{1} << (4 + any_.below(14)));
        const std::size_t alignment = std::size_t{1} << any_.below(11);
        failure why;
        void* const p = b.top().try_allocate(size, alignment, &why);
        if (p == nullptr) {
            check(why.code != errc::none, "refused without a reason", b);
            check(!b.closed || why.code == errc::closed, "refused for another reason than a close", b);
            return;
        }
        check(!b.closed, "handed out after a close", b);
        const auto begin = reinterpret_cast<std::uintptr_t>(p);
        check(begin % alignment == 0, "not aligned", b);
        const auto next = live_.lower_bound(begin);
        check(next == live_.end() || begin + std::max<std::size_t>(size, 1) <= next->first, "overlaps the next block",
              b);
        if (next != live_.begin()) {
            const auto& before = *std::prev(next);
            check(before.first + std::max<std::size_t>(before.second.size, 1) <= begin, "overlaps the block before", b);
        }
        live_[begin] = {size, alignment, at};
        order_.push_back(begin);
    }
    void free_one() {
        if (order_.empty()) return;
        auto& last = any_.of(order_);
        std::swap(last, order_.back());
        release(order_.back());
        order_.pop_back();
    }
    // As big as it isn't: whoever is asked says so, and nothing happens.
    void free_wrongly() {
        if (order_.empty()) return;
        const auto at = any_.of(order_);
        const block& b = live_.at(at);
        const branch& of = *branches_[b.branch];
        if (of.closed || !of.checks) return;
        const errc why = of.top().deallocate(reinterpret_cast<void*>(at), b.size + 1, b.alignment);
        check(why != errc::none, "a wrong free isn't refused", of);
        wrong_frees_ = device_.wrong();  // where nobody above it knows sizes
    }
    void release(std::uintptr_t at) {
        const block gone = live_.extract(at).mapped();
        branch& b = *branches_[gone.branch];
        const errc why = b.top().deallocate(reinterpret_cast<void*>(at), gone.size, gone.alignment);
        check(why == errc::none || (b.closed && why == errc::closed), "a block isn't taken back", b);
    }
    void empty(std::size_t at) {
        std::erase_if(order_, [&](std::uintptr_t p) {
            if (live_.at(p).branch != at) return false;
            release(p);
            return true;
        });
        for (int again = 0; again < 8; ++again) branches_[at]->settle();  // what one gives back, the one below keeps
    }
    // What it is promised, in one block, once it has nothing.
    void have_all(std::size_t at) {
        branch& b = *branches_[at];
        if (b.closed) return;
        empty(at);
        device_.fail_the(0);
        const auto all = static_cast<std::size_t>(b.quotas.front()->usage().guaranteed.count());
        if (all == 0 || b.fixed) return;
        failure why;
        void* const p = b.top().try_allocate(all, step, &why);
        check(p != nullptr, "refused what it is promised", b);
        if (p != nullptr) check(b.top().deallocate(p, all, step) == errc::none, "a block isn't taken back", b);
        check(b.top().try_allocate(2 * capacity, step, &why) == nullptr, "granted more than there is", b);
    }
    void resize(branch& b) {
        if (b.closed) return;
        quota& q = *b.quotas.front();
        const auto room = q.guarantee_room();
        const auto wanted = bytes{any_.below(room.count() / step + 1) * step};
        const errc why = q.resize(wanted, bytes{any_.below(capacity)});
        check(why == errc::none, "can't be resized to what there is room for", b);
    }
    void close(std::size_t at) {
        branch& b = *branches_[at];
        stream_.reach_all();
        (void)b.quotas.front()->close(instant{});
        b.closed = true;
    }
    void look(const branch& b) {
        const auto u = b.quotas.front()->usage();
        check(u.current <= u.guaranteed + u.borrowed || u.current > u.limit(), "more is charged than is granted", b);
        check(root_.usage().current <= bytes{capacity}, "the device is overcommitted", b);
        std::uint64_t charged = 0;
        for (const auto& each : branches_) charged += each->quotas.front()->usage().current.count();
        check(device_.used() <= charged, "the device has given more than is charged", b);
    }
    void check(bool good, const char* what, const branch& b) {
        if (!good && wrong_.empty()) wrong_ = what + (":" + b.made_of);
    }

    support::random any_;
    std::uint64_t operations_;
    paper_device device_;
    paper_stream stream_;
    gpushare::handle_table handles_;
    quota root_{bytes{capacity}};
    std::vector<std::unique_ptr<branch>> branches_;
    std::map<std::uintptr_t, block> live_;
    std::vector<std::uintptr_t> order_;
    std::uint64_t wrong_frees_ = 0;
    std::string wrong_;
};

void fuzz(std::uint64_t operations) {
    constexpr std::uint64_t each = 2'000;
    for (std::uint64_t nth = 0; nth < operations / each; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        REQUIRE(world(seed, each).run() == "");
    }
}

}  // namespace

TEST_CASE("stacks composed at random keep their promises", "[memory][composition][fuzz]") { fuzz(100'000); }
TEST_CASE("stacks composed at random keep their promises for long", "[memory][composition][fuzz][.long]") {
    fuzz(10'000'000);
}

}  // namespace composition_fuzz_test
