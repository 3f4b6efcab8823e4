// SPDX-License-Identifier: Apache-2.0
#include "inference_server/onnx_models.hpp"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/onnx.hpp>
#include <gpushare/graph/onnxruntime.hpp>
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/run.hpp>

#include "inference_server/lane.hpp"
#include "inference_server/read_file.hpp"

namespace inference_server {

namespace {

namespace graph = gpushare::graph;
using graph::element;
using graph::model_error;
using graph::model_fault;
using graph::onnx_model;
using graph::split_plan;

/// The protocol's types and the library's, which correspond one to one.
constexpr std::pair<datatype, element> types[] = {
    {datatype::boolean, element::boolean}, {datatype::uint8, element::u8},   {datatype::uint16, element::u16},
    {datatype::uint32, element::u32},      {datatype::uint64, element::u64}, {datatype::int8, element::i8},
    {datatype::int16, element::i16},       {datatype::int32, element::i32},  {datatype::int64, element::i64},
    {datatype::fp16, element::f16},        {datatype::bf16, element::bf16},  {datatype::fp32, element::f32},
    {datatype::fp64, element::f64}};

std::optional<datatype> datatype_of(element e) {
    for (const auto& [theirs, ours] : types)
        if (ours == e) return theirs;
    return std::nullopt;
}
element element_of(datatype d) {
    for (const auto& [theirs, ours] : types)
        if (theirs == d) return ours;
    return element::unknown;
}

/// The description of an input or output for clients.
tensor_info info_of(const graph::value& v, bool batches) {
    const auto type = datatype_of(v.type);
    if (!type) throw model_error(model_fault::bad_model, v.name, "its elements are of a type that isn't served");
    if (!v.ranked && batches)
        throw model_error(model_fault::bad_shapes, v.name, "its extents aren't known: no batches");
    tensor_info info{v.name, *type, {}};
    for (const auto& d : v.shape) info.shape.push_back(d.extent < 0 ? -1 : d.extent);
    if (batches && (info.shape.empty() || info.shape[0] != -1))
        throw model_error(model_fault::bad_shapes, v.name, "its first extent isn't open, so there are no batches");
    return info;
}

model_info info_of(const graph::model_graph& g, const model_setting& s, const std::string& engine) {
    model_info info{s.name, engine, {}, {}, s.batch, false};
    for (const auto v : g.inputs) info.inputs.push_back(info_of(g.values[v], s.batch != 0));
    for (const auto v : g.outputs) info.outputs.push_back(info_of(g.values[v], s.batch != 0));
    for (const auto& i : info.inputs)
        if (i.shape.size() > most_extents)
            throw model_error(model_fault::bad_shapes, i.name, "it has more extents than a request may have");
    return info;
}

/// The extents with which an input's pieces are measured. Throws if they aren't given.
std::vector<std::int64_t> measured_shape(const graph::value& v, const model_setting& s) {
    std::vector<std::int64_t> shape;
    for (const auto& d : v.shape) shape.push_back(d.extent);
    if (const auto given = s.shapes.find(v.name); given != s.shapes.end()) {
        const bool fits = !v.ranked || std::ranges::equal(shape, given->second, [](auto model, auto said) {
            return model < 0 || model == said;
        });
        if (!fits) throw model_error(model_fault::bad_shapes, v.name, "shape= says something else than the model");
        if (!v.ranked) shape.assign(given->second.size(), -1);
        for (std::size_t i = 0; i < shape.size(); ++i)
            if (shape[i] < 0) shape[i] = given->second[i];
    }
    if (s.batch != 0) shape[0] = s.batch;
    if (std::ranges::any_of(shape, [](auto extent) { return extent < 0; }) || (!v.ranked && shape.empty()))
        throw model_error(model_fault::bad_shapes, v.name,
                          "the model leaves extents of it open: shape= says with which the pieces are measured");
    return shape;
}

/// Whether a buffer can hold all values that are alive between two nodes.
bool has_a_place_to_cut(const graph::model_graph& g) {
    const auto lives = lifetimes(g);
    for (std::uint32_t at = 1; at < g.nodes.size(); ++at) {
        const auto over = crossing(g, lives, at);
        if (std::ranges::all_of(over,
                                [&](auto v) { return g.values[v].tensor && graph::size_of(g.values[v].type) != 0; }))
            return true;
    }
    return false;
}

/// One piece.
split_plan whole_plan(const graph::model_graph& g) {
    split_plan p{.of_graph = fingerprint(g)};
    p.order.resize(g.nodes.size());
    std::iota(p.order.begin(), p.order.end(), 0U);
    p.pieces.push_back({{0, static_cast<std::uint32_t>(g.nodes.size())}});
    return p;
}

/// A model that was read for an engine, the engine, and the model's previous cuts.
struct prepared {
    onnx_model plain;
    std::optional<onnx_model> fused{};
    std::optional<split_plan> kept{};

    [[nodiscard]] const onnx_model& to_cut() const noexcept { return fused ? *fused : plain; }
};

/// Says that a plan beside a model can't be read, and names the line.
struct plan_file_error : std::runtime_error {
    plan_file_error(const std::string& path, const graph::plan_error& e) : std::runtime_error(path + ": " + e.what()) {}
};

/// The plan beside the model; none if the plan is for another model. Throws plan_file_error.
std::optional<split_plan> kept_plan(const std::string& path, const graph::model_graph& g) {
    if (look_at(path) == file_look{}) return std::nullopt;
    try {
        return graph::parse_split_plan(read_file(path).first, g);
    } catch (const graph::plan_error& e) {
        if (e.why() == graph::plan_error::kind::graph_changed) return std::nullopt;
        throw plan_file_error(path, e);
    }
}

prepared prepare(const model_setting& s, const std::string& path, const onnx_engine& by) {
    prepared p{onnx_model::load(path)};
    const auto& g = p.plain.graph();
    if (g.nodes.empty()) throw model_error(model_fault::bad_model, {}, "it computes nothing");
    const auto info = info_of(g, s, by.name);
    for (const auto& [name, shape] : s.shapes)
        if (std::ranges::find(info.inputs, name, &tensor_info::name) == info.inputs.end())
            throw model_error(model_fault::missing_value, {}, "shape= is of an input that the model hasn't");
    for (const auto v : g.outputs)
        if (g.values[v].kind == graph::value_kind::weight)
            throw model_error(model_fault::bad_cut, g.values[v].name, "an output that is a weight");
    const auto whole = p.plain.whole();
    by.make(false)->add(whole);  // accepts the model, or throws the reason
    if (s.cut_to == gpushare::ns{}) return p;
    for (const auto v : g.inputs) (void)measured_shape(g.values[v], s);
    if (by.fused) {
        p.fused.emplace(
            onnx_model::parse(by.fused(whole), {.other_domains = by.domains, .like = &g, .own_names = true}));
        const auto theirs = info_of(p.fused->graph(), s, by.name);
        if (!std::ranges::equal(info.inputs, theirs.inputs, {}, &tensor_info::name, &tensor_info::name) ||
            !std::ranges::equal(info.outputs, theirs.outputs, {}, &tensor_info::name, &tensor_info::name))
            throw model_error(model_fault::engine, {}, "the engine makes other inputs and outputs of it");
    }
    const auto& cut = p.to_cut().graph();
    if (!has_a_place_to_cut(cut)) throw model_error(model_fault::bad_cut, {}, "there is no place where it can be cut");
    p.kept = kept_plan(plan_path(path, s.cut_to), cut);
    return p;
}

/// Runs pieces on the streams of the host's device.
struct on_stream {
    piece_runner& of;

    std::uint32_t add(const std::string& model) {
        of.add(model);
        return count++;
    }
    void remove_last() noexcept {
        of.remove_last();
        --count;
    }
    void enqueue(gpushare::host::stream& to, std::uint32_t piece, std::span<const graph::tensor* const> in,
                 std::span<graph::tensor* const> out) {
        to.launch({.blocks = 1}, [this, piece, in, out](const auto&) { of.run(piece, in, out); });
    }
    std::uint32_t count = 0;
};
static_assert(graph::piece_engine<on_stream, gpushare::host::stream>);

/// Made-up inputs: small waves, or zeros if the elements aren't floats.
class made_up_inputs {
public:
    made_up_inputs(const graph::model_graph& g, const model_setting& s) {
        for (const auto v : g.inputs) {
            graph::tensor t{.type = g.values[v].type, .shape = measured_shape(g.values[v], s)};
            auto& bytes = bytes_.emplace_back(t.size());
            if (t.type == element::f32)
                for (std::size_t i = 0; i < bytes.size() / sizeof(float); ++i) {
                    const float x = static_cast<float>(i * 37 % 101) / 100 - 0.5F;
                    std::memcpy(&bytes[i * sizeof(float)], &x, sizeof x);
                }
            t.data = bytes.data();
            t.capacity = bytes.size();
            all.push_back(std::move(t));
        }
    }
    std::vector<graph::tensor> all;

private:
    std::vector<std::vector<std::byte>> bytes_;
};

/// Finds the cuts by measurements as submissions of the tenant. The plan also fits the graph with
/// open extents.
split_plan measured_plan(const prepared& p, const model_setting& s, const onnx_engine& by, tenant& whose) {
    (void)whose.try_wake();  // a tenant that sleeps couldn't submit
    const auto runner = by.make(true);
    on_stream engine{*runner};
    gpushare::operator_table table;
    const made_up_inputs inputs(p.to_cut().graph(), s);
    graph::piece_measurer times(whose, p.to_cut(), engine, table, {.engine = by.name});
    times.run_nodes(inputs.all);
    graph::split_planner planner(times.graph(), times.nodes(), {.limit = s.cut_to});
    refine(planner, [&](auto nodes) { return times.measure(nodes); });
    auto plan = planner.plan();
    plan.of_graph = fingerprint(p.to_cut().graph());
    return plan;
}

/// Keeps a plan for the next load. If the plan can't be written, the next load measures again.
void keep(const split_plan& plan, const graph::model_graph& g, const std::string& path) {
    const std::string next = path + ".next";
    std::ofstream to(next);
    to << to_text(plan, g) << std::flush;
    std::error_code why;
    if (to) std::filesystem::rename(next, path, why);
    if (to && !why) return;
    std::filesystem::remove(next, why);
    std::fprintf(stderr, "inference_server: %s can't be written, so the model is measured at each load\n",
                 path.c_str());
}

/// A model in the pieces of a plan.
class cut_engine final : public engine {
public:
    cut_engine(const onnx_model& m, const split_plan& plan, std::unique_ptr<piece_runner> runner, model_info info,
               const surroundings& at)
        : info_(std::move(info)),
          runner_(std::move(runner)),
          values_(at.memory, m.graph(), plan, at.owner),
          outputs_(m.graph().outputs.size()) {
        for (const auto& p : plan.pieces) {
            runner_->add(m.extract(plan.nodes(p.places)));
            takes_.push_back(p.takes);
        }
    }

    [[nodiscard]] std::uint32_t pieces() const noexcept override { return values_.pieces(); }
    [[nodiscard]] gpushare::ns piece_takes(std::uint32_t piece) const noexcept override { return takes_[piece]; }
    void run(std::span<const tensor> inputs, std::vector<tensor>& outputs,
             gpushare::host::kernel_context& on) override {
        run_piece(0, inputs, outputs, on);
    }
    void run_piece(std::uint32_t piece, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                   gpushare::host::kernel_context&) override {
        if (piece == 0) begin(inputs);
        try {
            runner_->run(piece, values_.inputs(piece), values_.outputs(piece));
        } catch (const model_error& e) {
            // the sessions are unchanged: only this request can't be computed
            throw refused(400, "model '" + info_.name + "': " + e.what());
        }
        if (piece + 1 == pieces()) end(outputs);
    }

private:
    void begin(std::span<const tensor> inputs) {
        std::vector<graph::tensor> in;
        for (const auto& t : inputs)  // no engine writes its inputs
            in.push_back({element_of(t.type), t.shape, const_cast<std::byte*>(t.data.data()), t.data.size()});
        values_.begin(in, outputs_);
        rows_ = info_.max_batch == 0 ? 0 : inputs[0].shape[0];
    }
    void end(std::vector<tensor>& outputs) const {
        for (std::size_t i = 0; i < info_.outputs.size(); ++i) {
            const auto& from = values_.output(i);
            const auto* const data = static_cast<const std::byte*>(from.data);
            outputs.push_back({info_.outputs[i].name, info_.outputs[i].type, from.shape, {data, data + from.size()}});
        }
        if (info_.max_batch == 0) return;
        for (const auto& t : outputs)  // the number of rows tells the requests apart
            if (t.shape.empty() || t.shape[0] != rows_)
                throw refused(500, "model '" + info_.name + "': its outputs have other rows than the batch");
    }

    model_info info_;
    std::unique_ptr<piece_runner> runner_;
    graph::piece_tensors<std::pmr::memory_resource> values_;
    std::vector<graph::tensor> outputs_;  // without buffers: the tenant provides them
    std::vector<gpushare::ns> takes_{};
    std::int64_t rows_ = 0;  // the rows of the call
};

std::unique_ptr<engine> load(const model_setting& s, const std::string& path, const onnx_engine& by,
                             const model_info& promised, const surroundings& at) {
    const auto p = prepare(s, path, by);
    const auto same = [](const tensor_info& a, const tensor_info& b) {
        return a.name == b.name && a.type == b.type && a.shape == b.shape;
    };
    const auto info = info_of(p.plain.graph(), s, by.name);
    if (!std::ranges::equal(info.inputs, promised.inputs, same) ||
        !std::ranges::equal(info.outputs, promised.outputs, same))
        throw refused(503, "the model's file has other inputs or outputs than when the file of tenants was read");
    const bool cut = s.cut_to != gpushare::ns{};
    auto plan = cut ? p.kept : std::optional(whole_plan(p.plain.graph()));
    if (!plan) {
        plan = measured_plan(p, s, by, at.whose->who);
        keep(*plan, p.to_cut().graph(), plan_path(path, s.cut_to));
    }
    auto made = std::make_unique<cut_engine>(cut ? p.to_cut() : p.plain, *plan, by.make(cut), info, at);
    ::malloc_trim(0);  // the memory of measurements isn't the tenant's
    return made;
}

class onnxruntime_runner final : public piece_runner {
public:
    onnxruntime_runner(std::shared_ptr<const graph::onnxruntime_library> library, bool cut)
        : library_(std::move(library)), engine_(*library_, {.optimisation = cut ? 0 : 99}) {}
    void add(const std::string& model) override { (void)engine_.add(model); }
    void remove_last() noexcept override { engine_.remove_last(); }
    void run(std::uint32_t piece, std::span<const graph::tensor* const> inputs,
             std::span<graph::tensor* const> outputs) override {
        engine_.run(piece, inputs, outputs);
    }

private:
    std::shared_ptr<const graph::onnxruntime_library> library_;
    graph::onnxruntime_engine engine_;
};

}  // namespace

std::string plan_path(const std::string& model, gpushare::ns cut_to) {
    const auto us = cut_to.count() / 1000;
    return model + '.' + (us % 1000 == 0 ? std::to_string(us / 1000) + "ms" : std::to_string(us) + "us") + ".plan";
}

onnx_engine onnxruntime_of(const std::string& path) {
    const auto library = std::make_shared<const graph::onnxruntime_library>(path);
    return {"onnxruntime", [library](bool cut) { return std::make_unique<onnxruntime_runner>(library, cut); },
            [library](const std::string& model) { return graph::optimised(*library, model); },
            graph::onnxruntime_domains()};
}

std::function<model_source(const model_setting&, const std::string&)> onnx_models(std::vector<onnx_engine> engines) {
    return [engines = std::make_shared<const std::vector<onnx_engine>>(std::move(engines))](const model_setting& s,
                                                                                            const std::string& path) {
        const auto by = s.engine.empty() ? engines->begin() : std::ranges::find(*engines, s.engine, &onnx_engine::name);
        if (by == engines->end()) {
            std::string has;
            for (const auto& e : *engines) has += (has.empty() ? "it has " : ", ") + e.name;
            throw unknown_engine("the server is built without it; " + (has.empty() ? "it has none" : has));
        }
        auto info = info_of(prepare(s, path, *by).plain.graph(), s, by->name);
        const auto load_it = [engines, by, s, path, info](const surroundings& at) {
            return load(s, path, *by, info, at);
        };
        return model_source{std::move(info), load_it, {}, true, s.cut_to};
    };
}

}  // namespace inference_server
