// A decoder computed by the CUDA backend on the simulated device, streamed from a real server: what tests/python/test_cuda_model.py runs on the demo's
// model. Greedy: the token of the largest logit comes next.
//
// usage: cuda_model ADDRESS BUDGET TOKENS PROMPT,... layers width ffn_width vocabulary heads kv_heads rotary_size rotary_base norm_epsilon tied_head
// prints the tokens on one line, then one line of figures; status 1 with a text on stderr when anything is wrong, the simulation's findings included
#include "support/sim_cublaslt.hpp"
#include "support/sim_cuda.hpp"
#include "support/sim_cuda_kernels.hpp"

#include "paramwire/client/client.hpp"
#include "paramwire/compute/cuda_backend.hpp"
#include "paramwire/compute/llama.hpp"
#include "paramwire/engine/engine.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace paramwire {
namespace {

int fail(const std::string& why) {
  std::fprintf(stderr, "cuda_model: %s\n", why.c_str());
  return 1;
}

template <typename T>
T number(const char* text) {
  T value{};
  std::istringstream(text) >> value;
  return value;
}

std::vector<Token> tokens_of(const std::string& text) {
  std::vector<Token> out;
  std::istringstream in(text);
  for (std::string each; std::getline(in, each, ',');) out.push_back(number<Token>(each.c_str()));
  return out;
}

LlamaConfig config_of(char** words) {
  LlamaConfig out;
  out.layers = number<std::uint32_t>(words[0]);
  out.width = number<std::uint64_t>(words[1]);
  out.ffn_width = number<std::uint64_t>(words[2]);
  out.vocabulary = number<std::uint64_t>(words[3]);
  out.heads = number<std::uint32_t>(words[4]);
  out.kv_heads = number<std::uint32_t>(words[5]);
  out.rotary_size = number<std::uint32_t>(words[6]);
  out.rotary_base = number<double>(words[7]);
  out.norm_epsilon = number<double>(words[8]);
  out.tied_head = number<int>(words[9]) != 0;
  return out;
}

Status generate(testing::SimCuda& sim, testing::SimBlasLt& blas, char** words) {
  ClientOptions client_options;
  client_options.transport = "tcp";
  PARAMWIRE_TRY(client, Client::connect(words[1], client_options));
  PARAMWIRE_TRY(snapshot, client->snapshot({}));
  PARAMWIRE_TRY(graph, llama_graph(config_of(words + 5), Naming::kGguf));
  PARAMWIRE_TRY(backend, open_cuda_backend(sim.driver(), blas.api(), "", 0));
  EngineOptions options;
  options.budget_bytes = number<std::uint64_t>(words[2]);
  options.open_backend = std::move(backend);
  options.session.context_tokens = 64;
  options.session.step_tokens = 64;
  PARAMWIRE_TRY(engine, Engine::open(std::move(snapshot), graph, options));
  std::vector<Token> step = tokens_of(words[4]);
  for (int left = number<int>(words[3]); left > 0; --left) {
    PARAMWIRE_TRY(logits, engine->step(step));
    step = {static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin())};
    std::printf("%u ", step[0]);
  }
  const EngineStats stats = engine->stats();
  std::printf("\nheld_bytes %llu extents_deferred %llu graph_launches %llu\n", static_cast<unsigned long long>(stats.held_bytes_max),
              static_cast<unsigned long long>(client->stats().link.extents_deferred), static_cast<unsigned long long>(sim.calls("cuGraphLaunch")));
  return {};
}

int run(char** words) {
  testing::SimCudaOptions options;
  options.device_bytes = std::uint64_t{1} << 30;
  options.kernels = testing::sim_host_kernels();
  testing::SimCuda sim(std::move(options));
  {
    testing::SimBlasLt blas(sim);
    if (const Status status = generate(sim, blas, words); !status.ok()) return fail(status.error().to_string());
  }
  std::string found;
  for (const std::string& failure : sim.finish()) found += failure + "\n";
  return found.empty() ? 0 : fail(found);
}

}  // namespace
}  // namespace paramwire

int main(int count, char** words) {
  if (count != 15) return paramwire::fail("expected 14 arguments, see the head of its source");
  return paramwire::run(words);
}
