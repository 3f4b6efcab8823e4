// SPDX-License-Identifier: Apache-2.0
// Default implementations of an engine's members.
#include "inference_server/engine.hpp"

#include <stdexcept>

namespace inference_server {

void engine::run(std::span<const tensor>, std::vector<tensor>&, place&) {
    throw std::logic_error("the engine doesn't run");
}
void engine::run_in(std::span<std::byte>, std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on) {
    run(inputs, outputs, on);
}
void engine::run_piece(std::uint32_t, std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on) {
    run(inputs, outputs, on);
}
std::unique_ptr<generation> engine::generate(const std::string&, std::size_t) {
    throw refused(400, "the model doesn't stream");
}

}  // namespace inference_server
