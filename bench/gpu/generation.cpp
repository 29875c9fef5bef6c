// Tokens a second of a Llama-shaped decoder with the demo's model's shapes, weights from a seed: with all weights on the device, and streamed from a
// server through shared memory with room for a quarter of them.
#include "bench.hpp"

#include "paramwire/base/env.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/compute/cuda_backend.hpp"
#include "paramwire/compute/llama.hpp"
#include "paramwire/engine/engine.hpp"
#include "paramwire/server/server.hpp"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace paramwire::gpu {

namespace {

// SmolLM2-135M's, of its config.json; and one that a simulation computes.
LlamaConfig config_of(const Bench& bench) {
  LlamaConfig out;
  out.layers = bench.size(4U, 30U, 30U);
  out.width = bench.size<std::uint64_t>(64, 576, 576);
  out.ffn_width = bench.size<std::uint64_t>(160, 1536, 1536);
  out.vocabulary = bench.size<std::uint64_t>(512, 49'152, 49'152);
  out.heads = bench.size(4U, 9U, 9U);
  out.kv_heads = bench.size(2U, 3U, 3U);
  out.rotary_base = 100'000;
  out.tied_head = true;
  return out;
}

// A folder of its own for the server's socket.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "paramwire-gpu-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Generation {
 public:
  explicit Generation(Bench& bench) : bench_(bench), tokens_(bench.size(4, 48, 192)) {}

  Status run() {
    PARAMWIRE_CHECK(serve());
    PARAMWIRE_TRY(backend, open_cuda_backend(bench_.world.driver, bench_.world.blas, bench_.world.blas_problem, 0));
    backend_ = std::move(backend);
    PARAMWIRE_TRY(wanted, cpu_logits());
    PARAMWIRE_TRY(local, measure(0, wanted));
    PARAMWIRE_TRY(streamed, measure(model_bytes_ / 4, wanted));
    PARAMWIRE_TRY(copy, plain_copy_bytes_per_s());

    const bool same = local.generated == streamed.generated;
    const double all = 1 / local.seconds_per_token, some = 1 / streamed.seconds_per_token;
    bench_.add({.name = "local_generation", .value = all, .unit = "tokens/s", .correct = local.correct});
    // Where the link is slower than the computation, nothing can be as fast as local: what it allows is the second baseline.
    const double allowed = std::min(all, copy / streamed.bytes_per_token);
    bench_.add({.name = "streamed_generation", .value = some, .unit = "tokens/s", .baseline = "local_generation", .baseline_value = all, .target = 0.9, .correct = streamed.correct && same});
    bench_.add({.name = "streamed_generation_on_this_link", .value = some, .unit = "tokens/s", .baseline = "local, or as fast as plain copies bring what is streamed",
                .baseline_value = allowed, .target = 0.9, .correct = streamed.correct && same});
    return {};
  }

 private:
  struct Measured {
    double seconds_per_token = 0, bytes_per_token = 0;
    std::vector<Token> generated;
    bool correct = false;
  };

  Status serve() {
    PARAMWIRE_TRY(graph, llama_graph(config_of(bench_), Naming::kGguf));
    graph_ = std::move(graph);
    if (folder_.path().empty()) return Error(Code::kUnavailable, "no folder for a server's socket: TMPDIR can't be written to");
    ServerOptions options;
    options.unix_directory = folder_.path();
    PARAMWIRE_TRY(server, Server::open(options));
    server_ = std::move(server);
    PARAMWIRE_TRY(publish, server_->publish());
    Random random(300);
    for (const Parameter& parameter : graph_.parameters()) {
      std::uint64_t count = 1;
      for (const std::uint64_t size : parameter.shape.dims()) count *= size;
      const std::vector<std::uint16_t> values = parameter.shape.rank() == 1 ? std::vector<std::uint16_t>(count, 0x3f80) : matrix(random, count, parameter.shape[1]);
      PARAMWIRE_CHECK(publish.put({parameter.name, DType::kBF16, parameter.shape, {}}, std::as_bytes(std::span(values))));
      model_bytes_ += 2 * count;
    }
    PARAMWIRE_TRY(version, publish.finish());
    static_cast<void>(version);
    ClientOptions client_options;
    client_options.transport = "shm";
    PARAMWIRE_TRY(client, Client::connect(server_->endpoints()[0].to_string(), client_options));
    client_ = std::move(client);
    return {};
  }
  // bf16 numbers spread evenly, so that a product of `columns` of them with numbers about 1 is about 1.
  static std::vector<std::uint16_t> matrix(Random& random, std::uint64_t count, std::uint64_t columns) {
    const float scale = std::sqrt(3.0F / static_cast<float>(columns)) / 32'768.0F;
    std::vector<std::uint16_t> out(count);
    for (std::size_t i = 0; i < out.size(); i += 4) {
      std::uint64_t word = random.next();
      for (std::size_t j = i; j < std::min(out.size(), i + 4); ++j, word >>= 16) {
        const float value = static_cast<float>(static_cast<std::int16_t>(word & 0xffff)) * scale;
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        out[j] = static_cast<std::uint16_t>(bits >> 16);
      }
    }
    return out;
  }

  Result<std::unique_ptr<Engine>> open(std::uint64_t budget, bool on_device) const {
    EngineOptions options;
    options.budget_bytes = budget;
    if (on_device) options.open_backend = backend_;
    options.session.context_tokens = 512;
    options.session.step_tokens = 4;
    PARAMWIRE_TRY(snapshot, client_->snapshot({}));
    return Engine::open(std::move(snapshot), graph_, options);
  }
  Result<std::vector<float>> cpu_logits() const {
    PARAMWIRE_TRY(engine, open(0, false));
    PARAMWIRE_TRY(logits, engine->step(kPrompt));
    return std::vector<float>(logits.begin(), logits.end());
  }
  // float32 sums in other orders through all layers: far above rounding, far below what a wrong element makes.
  static bool near(std::span<const float> a, std::span<const float> b) {
    constexpr float kTolerance = 5e-3F;
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (!(std::fabs(a[i] - b[i]) <= kTolerance * std::max(1.0F, std::fabs(b[i])))) return false;
    }
    return true;
  }

  Result<Measured> measure(std::uint64_t budget, const std::vector<float>& wanted) const {
    Measured out;
    PARAMWIRE_TRY(engine, open(budget, true));
    std::vector<double> seconds;
    out.correct = true;
    for (int round = 0; round < bench_.size(1, 2, 4); ++round) {
      PARAMWIRE_CHECK(engine->rewind(0));
      PARAMWIRE_TRY(prompt, engine->step(kPrompt));
      out.correct = out.correct && near(prompt, wanted);
      std::vector<Token> generated = {largest(prompt)};
      const std::uint64_t fetched = engine->stats().bytes_fetched;
      const double begin = wall_seconds();
      for (int i = 0; i < tokens_; ++i) {
        PARAMWIRE_TRY(logits, engine->step({&generated.back(), 1}));
        generated.push_back(largest(logits));
      }
      const double end = wall_seconds();
      out.bytes_per_token = static_cast<double>(engine->stats().bytes_fetched - fetched) / tokens_;
      if (round > 0 || bench_.world.simulated) seconds.push_back((end - begin) / tokens_);
      out.correct = out.correct && (out.generated.empty() || out.generated == generated);
      out.generated = std::move(generated);
    }
    if (budget != 0) out.correct = out.correct && engine->stats().held_bytes_max <= budget;
    out.seconds_per_token = median(seconds);
    return out;
  }
  static Token largest(std::span<const float> logits) { return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin()); }

  Result<double> plain_copy_bytes_per_s() const {
    const std::uint64_t bytes = bench_.size<std::uint64_t>(100'000, std::uint64_t{64} << 20, std::uint64_t{256} << 20);
    PARAMWIRE_TRY(host, cuda::HostMemory::allocate(bench_.bed.device, bytes));
    std::fill(host.span().begin(), host.span().end(), std::byte{1});
    PARAMWIRE_TRY(target, bench_.bed.allocate(bytes));
    PARAMWIRE_TRY(seconds, bench_.device_seconds([&] { return bench_.bed.stream.to_device(target.address(), host.span()); }));
    return seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
  }

  static constexpr Token kPrompt[4] = {1, 17, 300, 41};

  Bench& bench_;
  const int tokens_;
  Folder folder_;
  Graph graph_;
  std::uint64_t model_bytes_ = 0;
  std::unique_ptr<Server> server_;
  std::shared_ptr<Client> client_;
  std::shared_ptr<Backend> backend_;
};

}  // namespace

Status bench_generation(Bench& bench) { return Generation(bench).run(); }

}  // namespace paramwire::gpu
