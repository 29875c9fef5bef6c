// The whole CUDA path but the silicon: the engine against a real server, its backend on a simulated device that works as late as the rules allow,
// computing with the kernels' own bodies; compared with the CPU backend.
#include "support/rig.hpp"

#include "cpp/cuda_backend_rig.hpp"
#include "cpp/small_mixture.hpp"
#include "paramwire/codec/payload.hpp"
#include "paramwire/compute/bert.hpp"
#include "paramwire/engine/engine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire {
namespace {

using namespace testing;

constexpr std::uint64_t kSeed = 300;

const std::vector<Token> kTokens = {3, 41, 95, 3, 0, 17, 60, 22};

// A server with the tensors of a graph, a client of it, and what the CPU backend makes of them.
class World {
 public:
  World(Graph graph, DType dtype, CodecId codec = CodecId::kRaw) : graph_(std::move(graph)), tensors_(oracle::random_tensors(graph_, dtype, kSeed)) {
    auto publish = must(rig_.server->publish());
    for (const auto& [name, tensor] : tensors_) {
      const std::span<const std::byte> bytes(tensor.bytes);
      if (codec != CodecId::kRaw) {
        const auto payload = must(encoder_.encode({{}, codec}, dtype, bytes, 1));
        must(publish.put({name, tensor.dtype, tensor.shape, {}, payload.codec, payload.bytes.size()}, payload.bytes));
        continue;
      }
      if (tensor.shape.rank() < 2) {
        must(publish.put({name, tensor.dtype, tensor.shape, {}}, bytes));
        continue;
      }
      // In two blocks of rows, so that pieces meet a cut.
      const std::uint64_t rows = tensor.shape[0], cut = rows / 3;
      const auto head = static_cast<std::size_t>(bytes.size() / rows * cut);
      if (cut > 0) must(publish.put({name, tensor.dtype, tensor.shape, Shard::rows(0, cut)}, bytes.first(head)));
      must(publish.put({name, tensor.dtype, tensor.shape, Shard::rows(cut, rows)}, bytes.subspan(head)));
    }
    static_cast<void>(must(publish.finish()));
    ClientOptions options;
    options.transport = "tcp";
    client_ = must(Client::connect(rig_.tcp_endpoint().to_string(), options));
  }

  std::vector<std::vector<float>> cpu_logits(const std::vector<std::vector<Token>>& steps) const {
    const auto backend = must(open_backend("cpu", {.threads = 1}));
    const auto binding = must(graph_.bind(oracle::infos(tensors_)));
    const auto session = must(backend->open_session(binding, {}));
    std::vector<std::vector<float>> out;
    for (const auto& tokens : steps) out.push_back(must(oracle::step(*session, tensors_, tokens, 1'000'000)));
    return out;
  }

  Result<std::unique_ptr<Engine>> open(std::shared_ptr<Backend> backend, std::uint64_t budget) const {
    EngineOptions options;
    options.budget_bytes = budget;
    options.open_backend = std::move(backend);
    options.session.context_tokens = 16;
    options.session.step_tokens = 16;
    return Engine::open(must(client_->snapshot({})), graph_, options);
  }

  // Bytes of rows that steps of the CPU backend ask for by data; experts: how many of them are experts.
  std::uint64_t bytes_by_data(const std::vector<std::vector<Token>>& steps, std::uint64_t& experts) const {
    const auto backend = must(open_backend("cpu", {.threads = 1}));
    const auto binding = must(graph_.bind(oracle::infos(tensors_)));
    const auto session = must(backend->open_session(binding, {}));
    std::uint64_t bytes = 0;
    for (const auto& tokens : steps) {
      must(session->begin(tokens));
      while (const Pending* pending = session->pending()) {
        const Need& need = binding.needs()[pending->need];
        bytes += pending->rows.size() * need.row_bytes;
        if (is_expert(graph_.ops()[need.op].kind)) experts += pending->rows.size();
        must(session->supply({need.tensor, need.dtype, 0, need.rows, tensors_.at(need.tensor).bytes}));
      }
      static_cast<void>(must(session->finish()));
    }
    return bytes;
  }

  Client& client() const { return *client_; }

  // The least that would do, as the refusal of one byte says.
  std::uint64_t smallest_budget(const std::shared_ptr<Backend>& backend) const {
    const auto refused = open(backend, 1);
    if (refused.ok()) return 0;
    const std::string text(refused.error().message());
    const std::size_t at = text.find("at least ");
    EXPECT_NE(at, std::string::npos) << text;
    return at == std::string::npos ? 0 : std::stoull(text.substr(at + 9));
  }

 private:
  Rig rig_;
  PayloadEncoder encoder_;
  Graph graph_;
  oracle::Tensors tensors_;
  std::shared_ptr<Client> client_;
};

TEST(CudaEngine, EveryBudgetOrderAndTypeComputesWhatTheCpuBackendComputes) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), dtype);
    const auto wanted = world.cpu_logits(one_by_one(kTokens));
    for (const SimOrder order : {SimOrder::kLate, SimOrder::kEager, SimOrder::kRandom}) {
      Gpu gpu(sim_options(order));
      ASSERT_NE(gpu.backend, nullptr) << gpu.error->to_string();
      const std::uint64_t least = world.smallest_budget(gpu.backend);
      for (const std::uint64_t budget : {std::uint64_t{0}, least, 2 * least}) {
        const auto engine = must(world.open(gpu.backend, budget));
        for (std::size_t i = 0; i < kTokens.size(); ++i) {
          const auto logits = copy(must(engine->step({&kTokens[i], 1})));
          ASSERT_LE(largest_difference(logits, wanted[i]), kTolerance) << "step " << i << ", budget " << budget << ", " << dtype_name(dtype);
        }
        const EngineStats stats = engine->stats();
        EXPECT_LE(stats.held_bytes_max, budget != 0 ? budget : UINT64_MAX);
        EXPECT_EQ(stats.source, "copy");
      }
    }
  }
}

TEST(CudaEngine, APromptInOneStepAgreesWithTheCpuBackend) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), dtype);
    const std::vector<std::vector<Token>> steps = {{kTokens.begin(), kTokens.begin() + 6}, {kTokens[6]}, {kTokens[7]}};
    const auto wanted = world.cpu_logits(steps);
    for (const bool with_blas : {true, false}) {
      Gpu gpu(sim_options(SimOrder::kLate), with_blas);
      for (const std::uint64_t budget : {std::uint64_t{0}, world.smallest_budget(gpu.backend)}) {
        const auto engine = must(world.open(gpu.backend, budget));
        for (std::size_t i = 0; i < steps.size(); ++i) {
          // Products of a prompt narrow their inputs to the weights' type: 8 bits of fraction for bf16.
          const float tolerance = with_blas && dtype == DType::kBF16 ? 0.05F : kTolerance;
          EXPECT_LE(largest_difference(copy(must(engine->step(steps[i]))), wanted[i]), tolerance) << "step " << i << ", budget " << budget;
        }
      }
      EXPECT_EQ(gpu.blas.products() > 0, with_blas);
    }
  }
}

TEST(CudaEngine, ExtentsAreComparedOnTheDeviceAndNotOnTheHost) {
  LlamaConfig config = oracle::small_llama();
  config.vocabulary = 6'000;  // a head of 768 KB, in two blocks: blocks of 64 KiB and less have no extents
  const World world(must(llama_graph(config, Naming::kGguf)), DType::kF32);
  const auto wanted = world.cpu_logits({{kTokens[0]}});
  Gpu gpu(sim_options(SimOrder::kLate));
  for (const std::uint64_t budget : {std::uint64_t{0}, std::uint64_t{400'000}}) {
    const std::uint64_t before = world.client().stats().link.extents_deferred;
    gpu.sim.clear_log();
    const auto engine = must(world.open(gpu.backend, budget));
    EXPECT_LE(largest_difference(copy(must(engine->step({&kTokens[0], 1}))), wanted[0]), kTolerance);
    EXPECT_GE(world.client().stats().link.extents_deferred, before + 8);
    const auto ran = gpu.sim.ran();
    EXPECT_GT(std::count(ran.begin(), ran.end(), "pw_crc32c_extents"), 0);
  }
}

// Exponents are decoded on the host, planes put together on the device and compared there.
TEST(CudaEngine, EncodedWeightsArePutTogetherOnTheDevice) {
  LlamaConfig config = oracle::small_llama();
  config.vocabulary = 1'500;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const World world(must(llama_graph(config, Naming::kGguf)), dtype, CodecId::kPlanes);
    const auto wanted = world.cpu_logits(one_by_one(std::span(kTokens).first(2)));
    Gpu gpu(sim_options(SimOrder::kLate));
    // All of it stays, or streams in pieces of whole chunks, or of rows, which the host decodes.
    const std::uint64_t least = world.smallest_budget(gpu.backend);
    for (const std::uint64_t budget : {std::uint64_t{0}, least + (std::uint64_t{300} << 10), least}) {
      gpu.sim.clear_log();
      const auto engine = must(world.open(gpu.backend, budget));
      for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_LE(largest_difference(copy(must(engine->step({&kTokens[i], 1}))), wanted[i]), kTolerance) << "step " << i;
      EXPECT_LE(engine->stats().held_bytes_max, budget != 0 ? budget : UINT64_MAX);
      const auto ran = gpu.sim.ran();
      EXPECT_EQ(std::count(ran.begin(), ran.end(), dtype == DType::kF32 ? "pw_merge_4" : "pw_merge_2") > 0, budget != least);
      EXPECT_EQ(std::count(ran.begin(), ran.end(), "pw_crc32c_extents") > 0, budget != least);
    }
  }
}

TEST(CudaEngine, AnEncoderGivesTheRowsOfTheCpuBackend) {
  BertConfig config;
  config.layers = 2;
  config.width = 32;
  config.ffn_width = 64;
  config.vocabulary = 96;
  config.heads = 4;
  config.positions = 16;
  config.normalise = true;
  const World world(must(bert_graph(config, Naming::kHuggingFace)), DType::kF32);
  const std::vector<Token> text(kTokens.begin(), kTokens.begin() + 7);
  const auto wanted = world.cpu_logits({text});
  Gpu gpu(sim_options(SimOrder::kLate));
  for (const std::uint64_t budget : {std::uint64_t{0}, world.smallest_budget(gpu.backend)}) {
    const auto engine = must(world.open(gpu.backend, budget));
    for (int round = 0; round < 2; ++round) {
      EXPECT_LE(largest_difference(copy(must(engine->step(text))), wanted[0]), kTolerance);
      must(engine->rewind(0));
    }
  }
}

// Experts of 324 KiB, of which the least budget holds one.
TEST(CudaEngine, AMixtureFetchesTheExpertsThatItsRouterPicksAndNoOther) {
  constexpr std::uint64_t kExpertBytes = 4 * 288 * 288;
  const MixtureConfig config{.layers = 2, .experts = 6, .k = 2, .width = 288, .ffn_width = 288, .vocabulary = 96};
  const World world(small_mixture(config), DType::kF32);
  const std::vector<std::vector<Token>> steps = {{3, 41, 95}, {17}, {60}};
  const auto wanted = world.cpu_logits(steps);
  std::uint64_t experts = 0;
  const std::uint64_t by_data = world.bytes_by_data(steps, experts);
  ASSERT_GE(experts, 3U * 2 * 3 * 2);
  ASSERT_LT(experts, 3U * 2 * 3 * 6) << "a test of fetching few";
  Gpu gpu(sim_options(SimOrder::kLate), false);
  const std::uint64_t least = world.smallest_budget(gpu.backend);
  EXPECT_GE(least, kExpertBytes);
  EXPECT_LT(least, 3 * kExpertBytes);
  for (const std::uint64_t budget : {least, least + 3 * kExpertBytes, std::uint64_t{0}}) {
    SCOPED_TRACE(budget);
    const auto engine = must(world.open(gpu.backend, budget));
    for (std::size_t i = 0; i < steps.size(); ++i) EXPECT_LE(largest_difference(copy(must(engine->step(steps[i]))), wanted[i]), kTolerance) << "step " << i;
    const EngineStats stats = engine->stats();
    const std::uint64_t streamed = stats.walk_bytes - stats.resident_bytes;
    // What streams is fetched ahead, as far as staging holds it.
    EXPECT_GE(stats.bytes_fetched, by_data + stats.resident_bytes + steps.size() * streamed);
    EXPECT_LE(stats.bytes_fetched, by_data + stats.resident_bytes + steps.size() * streamed + (streamed > 0 ? stats.staging_bytes : 0));
    EXPECT_EQ(streamed == 0, budget == 0);
    EXPECT_GE(stats.held_bytes_max, stats.resident_bytes + kExpertBytes) << "experts are counted";
    if (budget != 0) {
      EXPECT_LE(stats.held_bytes_max, budget);
    }
  }
}

TEST(CudaEngine, NothingIsAllocatedCapturedOrCreatedAfterOpening) {
  const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), DType::kBF16);
  Gpu gpu(sim_options(SimOrder::kLate));
  const auto engine = must(world.open(gpu.backend, world.smallest_budget(gpu.backend)));
  const char* const functions[] = {"cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate", "cuStreamBeginCapture", "cuGraphInstantiate", "cuLaunchKernel"};
  std::vector<std::uint64_t> before;
  for (const char* function : functions) before.push_back(gpu.sim.calls(function));
  for (const Token token : kTokens) ASSERT_TRUE(engine->step({&token, 1}).ok());
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(gpu.sim.calls(functions[i]), before[i]) << functions[i];
  EXPECT_GT(gpu.sim.calls("cuGraphLaunch"), kTokens.size()) << "several windows a step";
}

// CASES UP-25. In global mode any call of the process that a capture forbids ends it, whoever makes it: ours are made in relaxed mode, on streams that do not block.
TEST(CudaEngine, ACaptureOfTheUsersOwnIsWholeWhateverAnEngineDoesMeanwhile) {
  const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), DType::kF32);
  const auto wanted = world.cpu_logits(one_by_one(kTokens));
  SimCuda sim(sim_options(SimOrder::kLate));
  SimBlasLt blas(sim);
  const auto driver = sim.driver();
  const cuda::Driver& cu = *driver;
  ASSERT_EQ(cu.cuInit(0), CUDA_SUCCESS);
  CUcontext context = nullptr;
  ASSERT_EQ(cu.cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
  ASSERT_EQ(cu.cuCtxPushCurrent(context), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  CUdeviceptr memory = 0;
  ASSERT_EQ(cu.cuMemAlloc(&memory, 64), CUDA_SUCCESS);
  const auto use = [&] {
    const auto backend = std::shared_ptr<Backend>(must(open_cuda_backend(driver, blas.api(), "", 0)));
    const auto engine = must(world.open(backend, world.smallest_budget(backend)));
    for (std::size_t i = 0; i < 3; ++i) EXPECT_LE(largest_difference(copy(must(engine->step({&kTokens[i], 1}))), wanted[i]), kTolerance);
    must(engine->rewind(0));
    must(engine->adopt(must(world.client().snapshot({}))));
    EXPECT_TRUE(engine->step({kTokens.data(), 5}).ok()) << "a prompt";
  };
  for (const bool same_thread : {false, true}) {
    ASSERT_EQ(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    ASSERT_EQ(cu.cuMemsetD8Async(memory, 7, 64, stream), CUDA_SUCCESS);
    if (same_thread) use();
    else std::thread(use).join();
    ASSERT_EQ(cu.cuMemsetD8Async(memory, 8, 32, stream), CUDA_SUCCESS);
    CUgraph graph = nullptr;
    EXPECT_EQ(cu.cuStreamEndCapture(stream, &graph), CUDA_SUCCESS) << "same thread: " << same_thread;
    ASSERT_NE(graph, nullptr);
    EXPECT_EQ(cu.cuGraphDestroy(graph), CUDA_SUCCESS);
  }
  EXPECT_EQ(cu.cuMemFree(memory), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuCtxPopCurrent(&context), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

TEST(CudaEngine, TheChildOfAForkIsToldToStartAnewAndTheParentGoesOn) {
  const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), DType::kF32);
  Gpu gpu(sim_options(SimOrder::kLate));
  const auto engine = must(world.open(gpu.backend, world.smallest_budget(gpu.backend)));
  ASSERT_TRUE(engine->step({&kTokens[0], 1}).ok());
  const std::uint64_t calls = gpu.sim.calls("cuStreamWaitEvent");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // No assertion here: what it prints would be lost. The engine is left as it is: its threads are the parent's.
    const auto step = engine->step({&kTokens[1], 1});
    const bool right = !step.ok() && step.error().code() == Code::kInvalid && step.error().message().find("fork") != std::string_view::npos &&
                       gpu.sim.calls("cuStreamWaitEvent") == calls;
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child's step";
  const auto wanted = world.cpu_logits(one_by_one(kTokens));
  EXPECT_LE(largest_difference(copy(must(engine->step({&kTokens[1], 1}))), wanted[1]), kTolerance);
}

TEST(CudaEngine, AnyCallThatFailsOnceIsATypedErrorAndLeavesNothingBehind) {
  const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), DType::kF32);
  const std::vector<Token> tokens(kTokens.begin(), kTokens.begin() + 2);
  const char* const functions[] = {"cuDevicePrimaryCtxRetain", "cuMemAlloc", "cuStreamCreate", "cuEventCreate", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamWaitEvent", "cuEventRecord",
                                   "cuEventSynchronize", "cuStreamSynchronize", "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphLaunch", "cuLaunchKernel",
                                   "cuLibraryLoadData", "cuLibraryGetKernel", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"};
  std::uint64_t least = 0;
  {
    Gpu gpu(sim_options(SimOrder::kLate));
    least = world.smallest_budget(gpu.backend);
  }
  for (const char* function : functions) {
    for (const std::uint32_t nth : {1U, 2U, 3U, 7U, 20U}) {
      SimCuda sim(sim_options(SimOrder::kLate));
      SimBlasLt blas(sim);
      sim.fail_call(function, nth, CUDA_ERROR_OUT_OF_MEMORY);
      auto backend = open_cuda_backend(sim.driver(), blas.api(), "", 0);
      const auto typed = [&](const Error& error) {
        EXPECT_TRUE(error.code() == Code::kBackpressure || error.code() == Code::kUnavailable) << function << ", call " << nth << ": " << error.to_string();
        EXPECT_NE(error.message().find("cuda"), std::string::npos) << error.to_string();
      };
      if (!backend.ok()) {
        typed(backend.error());
        continue;
      }
      auto engine = world.open(std::shared_ptr<Backend>(std::move(*backend)), least);
      if (!engine.ok()) {
        typed(engine.error());
        continue;
      }
      for (const Token token : tokens) {
        const auto logits = (*engine)->step({&token, 1});
        if (logits.ok()) continue;
        typed(logits.error());
        break;
      }
    }
  }
}

TEST(CudaEngine, ALostDeviceIsUnavailableAndTheHostGoesOn) {
  const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), DType::kF32);
  Gpu gpu(sim_options(SimOrder::kLate));
  const auto engine = must(world.open(gpu.backend, world.smallest_budget(gpu.backend)));
  ASSERT_TRUE(engine->step({&kTokens[0], 1}).ok());
  gpu.sim.lose_device();
  const auto lost = engine->step({&kTokens[1], 1});
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code(), Code::kUnavailable) << lost.error().to_string();
  EXPECT_NE(lost.error().message().find("cuda:0"), std::string::npos);
  EXPECT_EQ(world.cpu_logits({{kTokens[0]}}).size(), 1U);
}

TEST(CudaEngine, WithoutPinnedMemoryItIsStagedByTheDriverAndRight) {
  const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), DType::kF32);
  const auto wanted = world.cpu_logits(one_by_one(kTokens));
  SimCudaOptions options = sim_options(SimOrder::kLate);
  options.pinned_bytes = 0;
  Gpu gpu(std::move(options));
  const auto engine = must(world.open(gpu.backend, world.smallest_budget(gpu.backend)));
  for (std::size_t i = 0; i < kTokens.size(); ++i) EXPECT_LE(largest_difference(copy(must(engine->step({&kTokens[i], 1}))), wanted[i]), kTolerance);
}

TEST(CudaEngine, WhatTheDeviceHasNoRoomForIsNamed) {
  const World world(must(llama_graph(oracle::small_llama(), Naming::kGguf)), DType::kF32);
  SimCudaOptions options = sim_options(SimOrder::kLate);
  options.device_bytes = 16U << 20;  // the workspace of matrix products alone takes twice that
  Gpu gpu(std::move(options));
  const auto refused = world.open(gpu.backend, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kBackpressure) << refused.error().to_string();
  EXPECT_NE(refused.error().message().find("32 MiB for the matrix products' workspace"), std::string::npos) << refused.error().message();
}

TEST(CudaBackend, MissingDevicesAndOldDriversSayWhatToDo) {
  SimCudaOptions none = sim_options(SimOrder::kLate);
  none.devices = 0;
  Gpu no_device(std::move(none));
  ASSERT_TRUE(no_device.error.has_value());
  EXPECT_EQ(no_device.error->code(), Code::kUnavailable);
}

TEST(CudaBackend, AnOldDriverIsNamedWithTheOneThatWouldDo) {
  SimCudaOptions old = sim_options(SimOrder::kLate);
  old.driver_version = 12040;
  Gpu gpu(std::move(old));
  ASSERT_TRUE(gpu.error.has_value());
  EXPECT_EQ(gpu.error->code(), Code::kUnavailable);
  EXPECT_NE(gpu.error->message().find("12.4"), std::string::npos) << gpu.error->message();
  EXPECT_NE(gpu.error->message().find("580"), std::string::npos) << gpu.error->message();
}

TEST(CudaBackend, AnOldDeviceAndAnUnknownOrdinalAreRefused) {
  SimCudaOptions old = sim_options(SimOrder::kLate);
  old.capability_major = 7;
  {
    Gpu gpu(std::move(old));
    ASSERT_TRUE(gpu.error.has_value());
    EXPECT_NE(gpu.error->message().find("7.0"), std::string::npos) << gpu.error->message();
  }
  SimCuda sim(sim_options(SimOrder::kLate));
  const auto refused = open_cuda_backend(sim.driver(), nullptr, "", 3);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kInvalid);
  EXPECT_NE(refused.error().message().find("cuda:3"), std::string::npos) << refused.error().message();
}

}  // namespace
}  // namespace paramwire
