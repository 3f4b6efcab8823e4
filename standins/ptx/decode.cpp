// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "program.hpp"

namespace ptx {

namespace {

using shape = text::operand::shape;

/// The words of an opcode: "ld.acquire.sys.b32" is ld, acquire, sys and b32.
std::vector<std::string_view> words_of(std::string_view opcode) {
    std::vector<std::string_view> words;
    for (std::size_t begin = 0; begin <= opcode.size();) {
        const std::size_t end = std::min(opcode.find('.', begin), opcode.size());
        words.push_back(opcode.substr(begin, end - begin));
        begin = end + 1;
    }
    return words;
}

struct scalar {
    std::string_view name;
    std::uint8_t bytes;
    bool sign = false;
};
constexpr std::array<scalar, 14> scalars{{{"b8", 1},
                                          {"u8", 1},
                                          {"s8", 1, true},
                                          {"b16", 2},
                                          {"u16", 2},
                                          {"s16", 2, true},
                                          {"b32", 4},
                                          {"u32", 4},
                                          {"s32", 4, true},
                                          {"f32", 4},
                                          {"b64", 8},
                                          {"u64", 8},
                                          {"s64", 8},
                                          {"f64", 8}}};

const std::map<std::string_view, own> special_registers{
    {"%tid.x", own::tid_x},       {"%tid.y", own::tid_y},       {"%tid.z", own::tid_z},
    {"%ntid.x", own::ntid_x},     {"%ntid.y", own::ntid_y},     {"%ntid.z", own::ntid_z},
    {"%ctaid.x", own::ctaid_x},   {"%ctaid.y", own::ctaid_y},   {"%ctaid.z", own::ctaid_z},
    {"%nctaid.x", own::nctaid_x}, {"%nctaid.y", own::nctaid_y}, {"%nctaid.z", own::nctaid_z},
    {"%laneid", own::laneid},     {"%warpid", own::warpid},     {"%smid", own::smid},
    {"%nsmid", own::nsmid},       {"%envreg1", own::envreg1},   {"%envreg2", own::envreg2}};

constexpr slot register_mark = 1U << 31;  // marks registers until the number of constants is known

std::uint32_t aligned(std::uint32_t offset, std::uint32_t alignment) {
    return (offset + alignment - 1) / alignment * alignment;
}

/// The place of a variable: the memory of its thread or block, and the offset.
struct place {
    std::string_view space;
    std::uint32_t offset = 0, bytes = 0;
};

class decoder {
public:
    decoder(const text::function& from, function& to, const std::vector<text::variable>& of_module,
            const std::map<std::string_view, std::pair<const text::function*, const function*>>& all)
        : from_(from), to_(to), all_(all) {
        to_.constants.push_back(1);  // the guard of instructions without a guard
        for (const auto& list : from_.declared) declare(list);
        for (const auto* list : {&from_.results, &from_.arguments})
            for (const auto& v : *list) {
                add(v, ".param of mine", to_.parameter_bytes);
                to_.parameters.push_back({variables_[v.name].offset, variables_[v.name].bytes});
            }
        std::uint32_t shared = shared_begin;
        for (const auto& v : of_module) add(v, v.space, shared);
        for (const auto& v : from_.variables) add(v, v.space, v.space == ".shared" ? shared : to_.local_bytes);
        to_.shared_bytes = shared - shared_begin;
        for (const auto& l : from_.labels) labels_.emplace(l.name, static_cast<std::uint32_t>(l.statement));
    }

    /// Stops at the first error, unless `errors` collects them.
    void run(std::set<std::string>* errors = nullptr) {
        for (const auto& s : from_.statements) {
            now_ = &s;
            try {
                to_.code.push_back(decode_statement());
                to_.sources.push_back(s.source);
            } catch (const error& e) {
                if (errors == nullptr) throw;
                errors->insert(e.detail());
            }
        }
        to_.code.push_back({.what = operation::leave, .line = from_.line});  // the end of the text
        to_.sources.emplace_back();
        settle();
        static std::uint32_t next_number = 1;
        for (instruction& i : to_.code) i.number = next_number++;
    }

private:
    [[noreturn]] void fail(problem what, const std::string& why) const {
        throw error(what, now_ != nullptr ? now_->line : from_.line, from_.name, why);
    }
    [[noreturn]] void unknown() const {
        fail(problem::unknown_instruction, "unknown instruction '" + std::string(now_->opcode) + "'");
    }

    // ---- names

    void declare(const text::registers& list) {
        if (!list.numbered) {
            registers_.emplace(list.name, next_register_++);
            return;
        }
        for (std::uint32_t i = 0; i < list.count; ++i)
            registers_.emplace(std::string(list.name) + std::to_string(i), next_register_++);
    }
    void add(const text::variable& v, std::string_view where, std::uint32_t& end) {
        end = aligned(end, v.alignment);
        variables_[v.name] = {where, end, static_cast<std::uint32_t>(v.bytes)};
        end += static_cast<std::uint32_t>(v.bytes);
    }
    slot constant(word value) {
        const auto [at, added] = constants_.emplace(value, static_cast<slot>(to_.constants.size()));
        if (added) to_.constants.push_back(value);
        return at->second;
    }
    slot own_value(own what, std::uint32_t offset = 0) {
        const auto [at, added] = owned_.emplace(std::pair(what, offset), static_cast<slot>(to_.constants.size()));
        if (added) {
            to_.constants.push_back(0);
            to_.own.push_back({at->second, what, offset});
        }
        return at->second;
    }
    slot named(std::string_view name) {
        if (const auto r = registers_.find(name); r != registers_.end()) return r->second | register_mark;
        if (const auto s = special_registers.find(name); s != special_registers.end()) return own_value(s->second);
        if (const auto v = variables_.find(name); v != variables_.end()) {
            if (v->second.space == ".shared" && shared_named_.insert(name).second) to_.shared_used += v->second.bytes;
            if (v->second.space == ".param of mine") return own_value(own::parameters, v->second.offset);
            if (v->second.space == ".param" || v->second.space == ".local")
                return own_value(own::locals, v->second.offset);
            if (v->second.space == ".shared") return constant(v->second.offset);
            fail(problem::unknown_directive, "no kernel of ours had a variable in " + std::string(v->second.space));
        }
        fail(problem::unknown_name, "nobody declares '" + std::string(name) + "'");
    }

    // ---- operands

    [[nodiscard]] const text::operand& operand(std::size_t i) const {
        if (i >= now_->operands.size()) fail(problem::syntax, "operands are missing");
        return now_->operands[i];
    }
    void expect_operands(std::size_t n) const {
        if (now_->operands.size() != n) fail(problem::syntax, std::to_string(n) + " operands are expected");
    }
    slot source(const text::operand& o) {
        switch (o.what) {
            case shape::name:
                if (!o.parts.empty()) fail(problem::unsupported_operand, "one register is expected");
                return named(o.name);
            case shape::integer:
            case shape::real32:
            case shape::real64: return constant(static_cast<word>(o.value));
            default: fail(problem::unsupported_operand, "neither a register nor a number");
        }
    }
    slot source(std::size_t i) { return source(operand(i)); }
    slot result(const text::operand& o) {
        if (!o.parts.empty()) fail(problem::unsupported_operand, "one result is expected");
        return result_of_pair(o);
    }
    slot result_of_pair(const text::operand& o) {
        const auto r = registers_.find(o.name);
        if (o.what != shape::name || r == registers_.end())
            fail(problem::unsupported_operand, "a result goes to a register");
        return r->second | register_mark;
    }
    slot result(std::size_t i) { return result(operand(i)); }
    void address(instruction& i, const text::operand& o) {
        if (o.what != shape::address) fail(problem::unsupported_operand, "an address is expected");
        i.at[4] = o.name.empty() ? constant(0) : named(o.name);
        i.offset = o.value;
    }
    void elements(instruction& i, const text::operand& o, bool written) {
        const auto one = [&](const text::operand& e) { return written ? result(e) : source(e); };
        if (i.count == 1) {
            i.at[0] = one(o);
            return;
        }
        if (o.what != shape::elements || o.parts.size() != i.count)
            fail(problem::unsupported_operand, std::to_string(i.count) + " elements are expected");
        for (std::size_t e = 0; e < i.count; ++e) i.at[e] = one(o.parts[e]);
    }

    // ---- instructions

    instruction decode_statement() {
        instruction i;
        const auto words = words_of(now_->opcode);
        const std::string_view head = words[0];
        if (head != "vote" && std::ranges::any_of(now_->operands, &text::operand::negated))
            fail(problem::unsupported_operand, "a negated predicate");
        if (const pure* p = find_pure(now_->opcode); p != nullptr && !moves_parts()) {
            i = computation(*p);
        } else if (head == "mov") {
            i = move(words);
        } else if (head == "ld" || head == "st" || head == "atom" || head == "red") {
            i = access(words);
        } else if (head == "fence" || head == "membar") {
            i = fence(words);
        } else if (head == "bar" || head == "barrier") {
            i = barrier();
        } else if (head == "shfl") {
            i = shuffle(words);
        } else if (head == "vote") {
            i = vote(words);
        } else if (now_->opcode == "nanosleep.u32") {
            expect_operands(1);
            i.what = operation::sleep;
            i.at[0] = source(std::size_t{0});
        } else if (now_->opcode == "bra" || now_->opcode == "bra.uni") {
            expect_operands(1);
            i.what = operation::branch;
            const auto l = labels_.find(operand(0).name);
            if (l == labels_.end()) fail(problem::unknown_name, "no label '" + std::string(operand(0).name) + "'");
            i.target = l->second;
        } else if (head == "call") {
            i = call_of();
        } else if (now_->opcode == "ret" || now_->opcode == "exit") {
            i.what = operation::leave;
        } else if (now_->opcode == "trap") {
            i.what = operation::trap;
        } else {
            unknown();
        }
        i.line = now_->line;
        i.negated = now_->negated;
        i.guard = now_->guard.empty() ? 0 : named(now_->guard);
        return i;
    }

    /// Whether the mov has operands in parts, or reads the clock.
    [[nodiscard]] bool moves_parts() const {
        return now_->opcode.starts_with("mov.") && std::ranges::any_of(now_->operands, [](const text::operand& o) {
                   return o.what == shape::elements || o.name == "%globaltimer";
               });
    }
    instruction computation(const pure& p) {
        instruction i{.what = operation::compute, .compute = p.compute};
        if (now_->opcode.starts_with("bfi.")) {  // the field's place as one operand
            expect_operands(5);
            if (operand(3).what != shape::integer || operand(4).what != shape::integer)
                fail(problem::unsupported_operand, "a field whose place isn't constant");
            i.at = {result(std::size_t{0}),
                    source(1),
                    source(2),
                    constant(static_cast<word>((operand(3).value & 0xff) | (operand(4).value & 0xff) << 8)),
                    0,
                    0};
            return i;
        }
        expect_operands(p.sources + std::size_t{1});
        i.at[0] = result(std::size_t{0});
        for (std::size_t s = 1; s <= p.sources; ++s) i.at[s] = source(s);
        return i;
    }
    // 9.7.9.2
    instruction move(const std::vector<std::string_view>& words) {
        expect_operands(2);
        instruction i;
        if (operand(1).name == "%globaltimer") {
            if (now_->opcode != "mov.u64" && now_->opcode != "mov.b64") unknown();
            i.what = operation::clock;
            i.at[0] = result(std::size_t{0});
            return i;
        }
        if (words.size() != 2 || (words[1] != "b32" && words[1] != "b64")) unknown();
        const bool packs = operand(1).what == shape::elements;
        const text::operand& parts = operand(packs ? 1 : 0);
        const text::operand& whole = operand(packs ? 0 : 1);
        i.what = packs ? operation::pack : operation::unpack;
        i.count = static_cast<std::uint8_t>(parts.parts.size());
        if (i.count != 2 && i.count != 4) fail(problem::unsupported_operand, "two or four parts are expected");
        i.bytes = static_cast<std::uint8_t>((words[1] == "b32" ? 4 : 8) / i.count);
        elements(i, parts, !packs);
        i.at[4] = packs ? result(whole) : source(whole);
        return i;
    }

    /// 9.7.9.8 ff: decodes an access by its modifiers, in any order.
    instruction access(const std::vector<std::string_view>& words) {
        instruction i;
        i.what = words[0] == "ld" ? operation::load : words[0] == "st" ? operation::store : operation::atomic;
        const bool atomic = i.what == operation::atomic;
        const bool returns = words[0] != "red";  // 9.7.13.6: an atom without a result
        std::optional<order> ordering;
        std::optional<scope> reach;
        std::string_view operation_name, type;
        for (std::size_t w = 1; w < words.size(); ++w) {
            const std::string_view m = words[w];
            if (m == "global" || m == "local") continue;  // the address is the same as a generic address
            if (const auto* s = std::ranges::find(scalars, m, &scalar::name);
                s != scalars.end() && w + 1 == words.size()) {
                type = m;
                i.bytes = s->bytes;
                i.sign = s->sign;
            } else if (m == "shared" || m == "param") {
                i.where = m == "shared" ? space::shared : space::param;
            } else if ((m == "v2" || m == "v4") && !atomic) {
                i.count = m == "v2" ? 2 : 4;
            } else if (m == "weak" && !atomic) {
                ordering = order::weak;
            } else if (m == "volatile" && !atomic) {  // 8.4.1: as relaxed, of system scope
                ordering = order::relaxed;
                reach = scope::sys;
            } else if (m == "relaxed") {
                ordering = order::relaxed;
            } else if (m == "acquire" && i.what != operation::store && returns) {
                ordering = order::acquire;
            } else if (m == "release" && i.what != operation::load) {
                ordering = order::release;
            } else if (m == "acq_rel" && atomic && returns) {
                ordering = order::acq_rel;
            } else if (m == "cta" || m == "gpu" || m == "sys") {
                reach = m == "cta" ? scope::cta : m == "gpu" ? scope::gpu : scope::sys;
            } else if (atomic && operation_name.empty()) {
                operation_name = m;
            } else {
                unknown();
            }
        }
        if (type.empty()) unknown();
        i.ordering = ordering.value_or(atomic ? order::relaxed : order::weak);
        // 9.7.13.5: an atomic operation without a scope has the scope of the device. Other strong
        // accesses must name a scope.
        if (i.ordering != order::weak && !reach && !atomic) unknown();
        i.reach = i.ordering == order::weak ? scope::thread : reach.value_or(scope::gpu);
        if (i.ordering == order::weak && reach) unknown();
        if (atomic) {
            finish_atomic(i, operation_name, type, returns);
            return i;
        }
        expect_operands(2);
        const bool loads = i.what == operation::load;
        elements(i, operand(loads ? 0 : 1), loads);
        address(i, operand(loads ? 1 : 0));
        return i;
    }
    void finish_atomic(instruction& i, std::string_view name, std::string_view type, bool returns) {
        const std::string combine = (name == "exch" ? "mov" : std::string(name)) + "." + std::string(type);
        const pure* p = find_pure(combine);
        constexpr std::array<std::string_view, 7> known{"add", "exch", "min", "max", "and", "or", "xor"};
        if (p == nullptr || i.bytes < 4 || std::ranges::find(known, name) == known.end()) unknown();
        if (name == "exch" && !returns) unknown();
        const std::size_t first = returns ? 1 : 0;
        expect_operands(first + 2);
        i.compute = p->compute;
        i.at[0] = returns ? result(std::size_t{0}) : next_register_++ | register_mark;  // an unused register
        address(i, operand(first));
        i.at[1] = source(first + 1);
    }

    // 9.7.13.4
    instruction fence(const std::vector<std::string_view>& words) {
        instruction i{.what = operation::fence, .ordering = order::sc};
        if (words[0] == "membar") {
            if (words.size() != 2) unknown();
            i.reach = words[1] == "cta" ? scope::cta : words[1] == "gl" ? scope::gpu : scope::sys;
            if (i.reach == scope::sys && words[1] != "sys") unknown();
            return i;
        }
        for (std::size_t w = 1; w < words.size(); ++w) {
            if (words[w] == "sc")
                i.ordering = order::sc;
            else if (words[w] == "acq_rel")
                i.ordering = order::acq_rel;
            else if (words[w] == "acquire")
                i.ordering = order::acquire;
            else if (words[w] == "release")
                i.ordering = order::release;
            else if (words[w] == "cta")
                i.reach = scope::cta;
            else if (words[w] == "gpu")
                i.reach = scope::gpu;
            else if (words[w] == "sys")
                i.reach = scope::sys;
            else
                unknown();
        }
        if (i.reach == scope::thread) unknown();
        return i;
    }

    // 9.7.13.1 and 9.7.13.2: barriers of all threads of a block or of a warp
    instruction barrier() {
        instruction i;
        if (now_->opcode == "bar.warp.sync") {
            expect_operands(1);
            i.what = operation::warp_barrier;
            i.at[4] = source(std::size_t{0});
            return i;
        }
        i.what = operation::barrier;
        i.aligned = now_->opcode != "barrier.sync" && now_->opcode != "barrier.cta.sync";
        if (i.aligned && now_->opcode != "bar.sync" && now_->opcode != "barrier.sync.aligned" &&
            now_->opcode != "barrier.cta.sync.aligned")
            unknown();
        if (now_->operands.size() != 1) fail(problem::unsupported_operand, "a barrier of a part of its block");
        i.at[0] = source(std::size_t{0});
        return i;
    }
    // 9.7.9.6
    instruction shuffle(const std::vector<std::string_view>& words) {
        if (words.size() != 4 || words[1] != "sync" || words[3] != "b32") unknown();
        instruction i{.what = operation::shuffle};
        if (words[2] == "up")
            i.mode = shuffle_mode::up;
        else if (words[2] == "down")
            i.mode = shuffle_mode::down;
        else if (words[2] == "bfly")
            i.mode = shuffle_mode::butterfly;
        else if (words[2] == "idx")
            i.mode = shuffle_mode::indexed;
        else
            unknown();
        expect_operands(5);
        i.at = {result_of_pair(operand(0)), source(1), source(2), source(3), source(4), 0};
        i.second_result = !operand(0).parts.empty();
        if (i.second_result) i.at[5] = result(operand(0).parts[0]);
        return i;
    }

    // 9.7.13.9
    instruction vote(const std::vector<std::string_view>& words) {
        if (words.size() != 4 || words[1] != "sync") unknown();
        instruction i{.what = operation::vote};
        if (words[2] == "all")
            i.asks = vote_mode::all;
        else if (words[2] == "any")
            i.asks = vote_mode::any;
        else if (words[2] == "uni")
            i.asks = vote_mode::uniform;
        else if (words[2] == "ballot")
            i.asks = vote_mode::ballot;
        else
            unknown();
        if (words[3] != (i.asks == vote_mode::ballot ? "b32" : "pred")) unknown();
        expect_operands(3);
        if (operand(0).negated || operand(2).negated) fail(problem::unsupported_operand, "a negated result or mask");
        i.opposite = operand(1).negated;
        i.at = {result(std::size_t{0}), source(1), 0, 0, source(2), 0};
        return i;
    }

    // 9.7.12.5: parameters are copied from the caller's to the callee's, and results back.
    instruction call_of() {
        if (now_->opcode != "call.uni" && now_->opcode != "call") unknown();
        const bool returns = operand(0).what == shape::elements;
        const auto callee = all_.find(operand(returns ? 1 : 0).name);
        if (callee == all_.end()) fail(problem::unknown_name, "a call of something that isn't here");
        const auto& [declared, decoded] = callee->second;
        call c{.callee = decoded};
        std::uint32_t at = 0;
        const auto copies = [&](const std::vector<text::variable>& theirs, const text::operand& mine,
                                std::vector<call::copy>& list, bool back) {
            if (mine.what != shape::elements || mine.parts.size() != theirs.size())
                fail(problem::syntax, "another number of parameters");
            for (std::size_t p = 0; p < theirs.size(); ++p) {
                const auto local = variables_.find(mine.parts[p].name);
                if (local == variables_.end() || local->second.space != ".param" ||
                    local->second.bytes != theirs[p].bytes)
                    fail(problem::unsupported_operand, "no parameter of this size");
                at = aligned(at, theirs[p].alignment);
                const auto size = static_cast<std::uint32_t>(theirs[p].bytes);
                if (back)
                    list.push_back({at, local->second.offset, size});
                else
                    list.push_back({local->second.offset, at, size});
                at += size;
            }
        };
        const text::operand none{.what = shape::elements};
        copies(declared->results, returns ? operand(0) : none, c.results, true);
        const std::size_t arguments = returns ? 2 : 1;
        copies(declared->arguments, now_->operands.size() > arguments ? operand(arguments) : none, c.arguments, false);
        to_.calls.push_back(std::move(c));
        return {.what = operation::call, .target = static_cast<std::uint32_t>(to_.calls.size() - 1)};
    }

    /// Registers follow the constants.
    void settle() {
        const auto first = static_cast<slot>(to_.constants.size());
        const auto settled = [&](slot s) { return (s & register_mark) != 0 ? (s & ~register_mark) + first : s; };
        for (instruction& i : to_.code) {
            i.guard = settled(i.guard);
            for (slot& s : i.at) s = settled(s);
        }
        to_.slots = first + next_register_;
    }

    const text::function& from_;
    function& to_;
    const std::map<std::string_view, std::pair<const text::function*, const function*>>& all_;
    const text::statement* now_ = nullptr;
    std::map<std::string, slot, std::less<>> registers_;
    std::map<std::string_view, place> variables_;
    std::set<std::string_view> shared_named_;
    std::map<std::string_view, std::uint32_t> labels_;
    std::map<word, slot> constants_;
    std::map<std::pair<own, std::uint32_t>, slot> owned_;
    slot next_register_ = 0;
};

}  // namespace

const function* program::find(std::string_view name) const {
    const auto at = std::ranges::find(functions, name, [](const auto& f) -> std::string_view { return f->name; });
    return at == functions.end() ? nullptr : at->get();
}

std::pair<const function*, const instruction*> program::find(std::uint32_t number) const {
    for (const auto& f : functions) {
        const std::uint32_t first = f->code.front().number;
        if (number >= first && number - first < f->code.size()) return {f.get(), &f->code[number - first]};
    }
    return {};
}

std::string describe(const program& p, const function& f, const instruction& i) {
    const text::location& at = f.sources[static_cast<std::size_t>(&i - f.code.data())];
    std::string text = f.name + ", PTX line " + std::to_string(i.line), places;
    const auto add = [&](std::uint32_t file, std::uint32_t line) {
        if (line != 0 && file < p.files.size())
            places += (places.empty() ? " (" : ", inlined into ") + p.files[file] + ":" + std::to_string(line);
    };
    add(at.file, at.line);
    constexpr std::size_t enough = 3;
    for (std::size_t c = 0; c < enough; ++c) add(at.callers[c].file, at.callers[c].line);
    return text + places + (places.empty() ? "" : ")");
}

std::map<std::string, std::uint32_t, std::less<>> registers_of(std::string_view report, std::string_view target) {
    std::map<std::string, std::uint32_t, std::less<>> all;
    const std::string_view begin = "Compiling entry function '", used = "Used ";
    const auto number = [](std::string_view text) {
        std::uint32_t n = 0;
        for (const char c : text.substr(0, text.find(' '))) n = 10 * n + static_cast<std::uint32_t>(c - '0');
        return n;
    };
    for (std::size_t at = report.find(begin); at != report.npos; at = report.find(begin, at)) {
        at += begin.size();
        const std::string_view rest = report.substr(at), name = rest.substr(0, rest.find('\''));
        const std::size_t end = std::min(rest.find(begin), rest.size()), says = rest.find(used);
        if (says < end && rest.substr(name.size() + 1).starts_with(" for '" + std::string(target) + "'"))
            all[std::string(name)] = number(rest.substr(says + used.size()));
    }
    return all;
}

namespace {

program decode(const text::module& m, std::set<std::string>* errors) {
    program p{.functions = {}, .files = m.files, .target = m.target};
    std::map<std::string_view, std::pair<const text::function*, const function*>> all;
    std::vector<std::pair<const text::function*, function*>> defined;
    for (const auto& f : m.functions) {
        if (f.declared_only) continue;
        p.functions.push_back(std::make_unique<function>());
        function& made = *p.functions.back();
        made.name = f.name;
        made.entry = f.entry;
        made.line = f.line;
        made.most_threads = f.most_threads;
        all.emplace(f.name, std::pair(&f, &made));
        defined.emplace_back(&f, &made);
    }
    for (const auto& [from, to] : defined) decoder(*from, *to, m.variables, all).run(errors);
    return p;
}

}  // namespace

program decode(const text::module& m) { return decode(m, nullptr); }

std::set<std::string> unknown_in(const text::module& m) {
    std::set<std::string> errors;
    (void)decode(m, &errors);
    return errors;
}

}  // namespace ptx
