// An engine goes on with another version of its model: on the host by views and by copies, on a (simulated) device; in place, or prepared beside its steps.
#include "support/rig.hpp"

#include "cpp/compute_oracle.hpp"
#include "paramwire/client/client.hpp"
#include "paramwire/codec/payload.hpp"
#include "paramwire/compute/llama.hpp"
#include "paramwire/engine/engine.hpp"
#if PARAMWIRE_HAVE_CUDA
#include "cpp/cuda_backend_rig.hpp"
#endif

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace paramwire {
namespace {

using testing::must;
using Source = EngineOptions::Source;

constexpr std::uint64_t kSeed = 300;
const std::vector<Token> kTokens = {3, 41, 95};

struct Way {
  const char* name;
  const char* transport;
  Source source;
  bool device = false;
};

class EngineVersions : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
#if PARAMWIRE_HAVE_CUDA
    if (GetParam().device) gpu_ = std::make_unique<testing::Gpu>(testing::sim_options(testing::SimOrder::kLate));
#endif
    graph_ = must(llama_graph(oracle::small_llama(), Naming::kGguf));
    tensors_ = oracle::random_tensors(graph_, DType::kF32, kSeed);
    publish(tensors_, {});
    ClientOptions options;
    options.transport = GetParam().transport;
    client_ = must(Client::connect(rig_.tcp_endpoint().to_string(), options));
  }

  // only: names; empty: all. Matrices in two blocks of rows.
  void publish(const oracle::Tensors& tensors, const std::set<std::string>& only) {
    auto publish = must(rig_.server->publish());
    for (const auto& [name, tensor] : tensors) {
      if (!only.empty() && !only.contains(name)) continue;
      const std::span<const std::byte> bytes(tensor.bytes);
      if (tensor.shape.rank() < 2) {
        must(publish.put({name, tensor.dtype, tensor.shape, {}}, bytes));
        continue;
      }
      const std::uint64_t rows = tensor.shape[0], cut = rows / 3;
      const auto head = static_cast<std::size_t>(bytes.size() / rows * cut);
      must(publish.put({name, tensor.dtype, tensor.shape, Shard::rows(0, cut)}, bytes.first(head)));
      must(publish.put({name, tensor.dtype, tensor.shape, Shard::rows(cut, rows)}, bytes.subspan(head)));
    }
    static_cast<void>(must(publish.finish()));
  }
  // Version `number` differs from the one before in these tensors.
  void publish_next(std::uint64_t number, const std::set<std::string>& changed) {
    const oracle::Tensors other = oracle::random_tensors(graph_, DType::kF32, kSeed + number);
    for (const std::string& name : changed) tensors_.at(name) = other.at(name);
    publish(tensors_, changed);
  }
  // By a session that is given whole tensors.
  std::vector<std::vector<float>> plain_logits() const {
    const auto backend = must(open_backend("cpu", {.threads = 1}));
    const auto binding = must(graph_.bind(oracle::infos(tensors_)));
    const auto session = must(backend->open_session(binding, {}));
    std::vector<std::vector<float>> out;
    for (const Token token : kTokens) out.push_back(must(oracle::step(*session, tensors_, {&token, 1}, 1'000'000)));
    return out;
  }
  std::shared_ptr<Snapshot> newest() { return must(client_->snapshot({})); }

  Result<std::unique_ptr<Engine>> open(std::uint64_t budget, std::uint32_t versions) {
    EngineOptions options;
    options.budget_bytes = budget;
    options.versions = versions;
    options.backend_options.threads = 1;
    options.source = GetParam().source;
    options.session.context_tokens = 16;
#if PARAMWIRE_HAVE_CUDA
    if (gpu_ != nullptr) options.open_backend = gpu_->backend;
#endif
    return Engine::open(newest(), graph_, options);
  }
  std::uint64_t smallest_budget(std::uint32_t versions) {
    const auto refused = open(1, versions);
    EXPECT_FALSE(refused.ok());
    if (refused.ok()) return 0;
    const std::string text(refused.error().message());
    const std::size_t at = text.find("at least ");
    EXPECT_NE(at, std::string::npos) << text;
    return at == std::string::npos ? 0 : std::stoull(text.substr(at + 9));
  }
  void expect_computes(Engine& engine, const std::vector<std::vector<float>>& wanted, const std::string& what) {
    must(engine.rewind(0));
    for (std::size_t i = 0; i < kTokens.size(); ++i) {
      const auto logits = engine.step({&kTokens[i], 1});
      ASSERT_TRUE(logits.ok()) << what << ": " << logits.error().to_string();
      ASSERT_EQ(logits->size(), wanted[i].size());
      float most = 0;
      for (std::size_t k = 0; k < logits->size(); ++k) most = std::max(most, std::fabs((*logits)[k] - wanted[i][k]) / std::max(1.0F, std::fabs(wanted[i][k])));
      // A device's sums are in another order.
      ASSERT_LE(most, GetParam().device ? 2e-4F : 0.0F) << what << ", step " << i;
    }
  }

  testing::Rig rig_;
  Graph graph_;
  oracle::Tensors tensors_;
  std::shared_ptr<Client> client_;
#if PARAMWIRE_HAVE_CUDA
  std::unique_ptr<testing::Gpu> gpu_;
#endif
};

const std::set<std::string> kMatrix = {"blk.0.ffn_down.weight"}, kVector = {"blk.1.attn_norm.weight"}, kRows = {"token_embd.weight"};

TEST_P(EngineVersions, EachIsComputedAsByAnEngineThatWasOpenedOnIt) {
  for (const std::uint32_t versions : {1U, 2U}) {
    const std::uint64_t least = smallest_budget(versions);
    for (const std::uint64_t budget : {std::uint64_t{0}, least, 3 * least}) {
      const auto engine = must(open(budget, versions));
      expect_computes(*engine, plain_logits(), "opened");
      std::uint64_t number = budget + versions;
      for (const auto& changed : {kMatrix, kVector, kRows, std::set<std::string>{}, kMatrix}) {
        if (changed.empty()) {
          tensors_ = oracle::random_tensors(graph_, DType::kF32, ++number);
          publish(tensors_, {});
        } else {
          publish_next(++number, changed);
        }
        must(engine->adopt(newest()));
        expect_computes(*engine, plain_logits(), "budget " + std::to_string(budget) + ", " + std::to_string(versions) + " versions");
        EXPECT_LE(engine->stats().held_bytes_max, budget != 0 ? budget : UINT64_MAX);
      }
      EXPECT_EQ(engine->stats().versions_adopted, 5U);
    }
  }
}

TEST_P(EngineVersions, OnlyWhatChangedOfWhatStaysIsFetched) {
  for (const std::uint32_t versions : {1U, 2U}) {
    const auto engine = must(open(0, versions));
    expect_computes(*engine, plain_logits(), "opened");
    const std::uint64_t matrix = tensors_.at(*kMatrix.begin()).bytes.size(), row = tensors_.at(*kRows.begin()).bytes.size() / tensors_.at(*kRows.begin()).shape[0];
    std::uint64_t number = 1000 * versions;
    for (int round = 0; round < 3; ++round) {
      publish_next(++number, kMatrix);
      const std::uint64_t before = engine->stats().bytes_fetched;
      must(engine->adopt(newest()));
      expect_computes(*engine, plain_logits(), "changed");
      // With two versions the first exchange fills the second set: on the host what is the same is copied from the first, or viewed; on a device too.
      const std::uint64_t fetched = engine->stats().bytes_fetched - before - kTokens.size() * row;
      if (GetParam().source == Source::kView && versions == 2 && round == 0) continue;  // views of all of it: nothing moves
      EXPECT_EQ(fetched, matrix) << versions << " versions, round " << round;
    }
  }
}

TEST_P(EngineVersions, StepsGoOnWithTheirVersionWhileTheNextIsPrepared) {
  for (const std::uint64_t budget : {std::uint64_t{0}, 3 * smallest_budget(2)}) {
    const auto engine = must(open(budget, 2));
    const auto first = plain_logits();
    expect_computes(*engine, first, "opened");
    tensors_ = oracle::random_tensors(graph_, DType::kF32, kSeed + 77 + budget);
    publish(tensors_, {});
    const auto next = newest();
    Status prepared;
    std::thread thread([&] { prepared = engine->prepare(next); });
    for (int round = 0; round < 3; ++round) expect_computes(*engine, first, "beside");
    thread.join();
    must(prepared);
    const std::uint64_t fetched = engine->stats().bytes_fetched;
    must(engine->adopt(next));
    if (budget == 0) {
      EXPECT_EQ(engine->stats().bytes_fetched, fetched) << "an exchange moves nothing";
    }
    expect_computes(*engine, plain_logits(), "adopted");
  }
}

TEST_P(EngineVersions, TheCacheStaysAndTheNextStepIsOfTheNewWeights) {
  const auto engine = must(open(0, 1));
  ASSERT_TRUE(engine->step({&kTokens[0], 1}).ok());
  const auto before = must(engine->step({&kTokens[1], 1}));
  const std::vector<float> old(before.begin(), before.end());
  must(engine->rewind(1));
  publish_next(5, kMatrix);
  must(engine->adopt(newest()));
  EXPECT_EQ(engine->position(), 1U);
  const auto after = must(engine->step({&kTokens[1], 1}));
  EXPECT_NE(old, std::vector<float>(after.begin(), after.end()));
}

TEST_P(EngineVersions, AnotherModelIsRefusedByNameAndTheEngineGoesOn) {
  const auto engine = must(open(0, 1));
  const auto wanted = plain_logits();
  const auto refused = [&](const std::string& text) {
    const Status adopted = engine->adopt(newest());
    ASSERT_FALSE(adopted.ok());
    EXPECT_EQ(adopted.error().code(), Code::kInvalid);
    EXPECT_NE(adopted.error().message().find(text), std::string::npos) << adopted.error().message();
    EXPECT_FALSE(engine->prepare(newest()).ok());
    expect_computes(*engine, wanted, "after the refusal");
  };
  const auto& tensor = tensors_.at(*kMatrix.begin());
  const auto republish = [&](DType dtype, const Shape& shape, std::uint64_t cut) {
    auto publish = must(rig_.server->publish());
    must(publish.remove(*kMatrix.begin()));
    static_cast<void>(must(publish.finish()));
    auto again = must(rig_.server->publish());
    const std::span<const std::byte> bytes(tensor.bytes);
    const std::uint64_t row_bytes = must(block_bytes(dtype, shape, Shard::rows(0, 1)));
    must(again.put({*kMatrix.begin(), dtype, shape, Shard::rows(0, cut)}, bytes.first(static_cast<std::size_t>(cut * row_bytes))));
    must(again.put({*kMatrix.begin(), dtype, shape, Shard::rows(cut, shape[0])}, bytes.first(static_cast<std::size_t>((shape[0] - cut) * row_bytes))));
    static_cast<void>(must(again.finish()));
  };
  republish(DType::kBF16, tensor.shape, 8);
  refused("the type of tensor \"blk.0.ffn_down.weight\" is bf16, and was f32");
  republish(tensor.dtype, Shape{tensor.shape[0] - 2, tensor.shape[1]}, 8);
  refused("the shape of tensor \"blk.0.ffn_down.weight\"");
  republish(tensor.dtype, tensor.shape, 8);
  refused("the number of blocks of tensor \"blk.0.ffn_down.weight\"");
}

// Whether a small block becomes smaller by its codec follows from its values.
TEST_P(EngineVersions, ABlockThatIsEncodedInOneVersionAndRawInTheNextIsNoOtherModel) {
  PayloadEncoder encoder;
  const auto publish_encoded = [&](const std::set<std::string>& raw) {
    auto publish = must(rig_.server->publish());
    for (const auto& [name, tensor] : tensors_) {
      if (tensor.shape.rank() > 1) must(publish.remove(name));  // its two blocks
    }
    static_cast<void>(must(publish.finish()));
    auto again = must(rig_.server->publish());
    for (const auto& [name, tensor] : tensors_) {
      const auto payload = must(encoder.encode({{}, raw.contains(name) ? CodecId::kRaw : CodecId::kPlanes}, tensor.dtype, tensor.bytes, 1));
      must(again.put({name, tensor.dtype, tensor.shape, {}, payload.codec, payload.bytes.size()}, payload.bytes));
    }
    static_cast<void>(must(again.finish()));
  };
  publish_encoded(kMatrix);
  ASSERT_EQ(must(newest()->find(*kMatrix.begin())).codec, CodecId::kRaw);
  for (const std::uint32_t versions : {1U, 2U}) {
    auto engine = open(0, versions);
    if (GetParam().source == Source::kView) {
      EXPECT_EQ(engine.error().code(), Code::kUnavailable) << "views show stored bytes";
      continue;
    }
    ASSERT_TRUE(engine.ok()) << engine.error().to_string();
    for (const auto& raw : {std::set<std::string>{}, kVector, kMatrix}) {
      publish_encoded(raw);
      must((*engine)->adopt(newest()));
      expect_computes(**engine, plain_logits(), "adopted");
    }
  }
}

TEST_P(EngineVersions, AClosedSnapshotIsRefusedAndTheEngineGoesOn) {
  for (const std::uint32_t versions : {1U, 2U}) {
    const auto engine = must(open(0, versions));
    const auto closed = newest();
    closed->close();
    EXPECT_EQ(engine->adopt(closed).error().code(), Code::kInvalid);
    EXPECT_EQ(engine->prepare(closed).error().code(), Code::kInvalid);
    expect_computes(*engine, plain_logits(), "after the refusal");
  }
}

TEST_P(EngineVersions, TheChildOfAForkIsRefusedAndLeavesTheEngineToItsParent) {
  auto engine = must(open(smallest_budget(1), 1));
  expect_computes(*engine, plain_logits(), "opened");
  const auto next = newest();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // No assertion here: what it prints would be lost.
    const bool refused = !engine->adopt(next).ok() && !engine->prepare(next).ok() && !engine->rewind(0).ok() && !engine->step({&kTokens[0], 1}).ok();
    engine.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_computes(*engine, plain_logits(), "in the parent");
}

TEST_P(EngineVersions, AnEngineWhoseSnapshotEndedGoesOnWithTheNext) {
  const std::uint64_t budget = smallest_budget(1);
  const auto first = newest();
  const auto engine = must(open(budget, 1));
  expect_computes(*engine, plain_logits(), "opened");
  const_cast<Snapshot&>(engine->snapshot()).close();
  Status ended;
  for (int i = 0; i < 8 && ended.ok(); ++i) {
    must(engine->rewind(0));
    const auto logits = engine->step({&kTokens[0], 1});
    if (!logits.ok()) ended = logits.error();
  }
  ASSERT_FALSE(ended.ok());
  EXPECT_FALSE(engine->step({&kTokens[0], 1}).ok()) << "and stays over";
  publish_next(9, kMatrix);
  must(engine->adopt(newest()));
  expect_computes(*engine, plain_logits(), "adopted");
}

#if PARAMWIRE_HAVE_CUDA
class CudaVersions : public EngineVersions {};

TEST_P(CudaVersions, NothingIsAllocatedOrCapturedForAnother) {
  for (const std::uint32_t versions : {1U, 2U}) {
    const auto engine = must(open(smallest_budget(versions), versions));
    expect_computes(*engine, plain_logits(), "opened");
    const char* const functions[] = {"cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate", "cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphUpload"};
    std::vector<std::uint64_t> before;
    for (const char* function : functions) before.push_back(gpu_->sim.calls(function));
    for (std::uint64_t number = 1; number <= 3; ++number) {
      publish_next(2000 * versions + number, kMatrix);
      must(engine->adopt(newest()));
      expect_computes(*engine, plain_logits(), "adopted");
    }
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(gpu_->sim.calls(functions[i]), before[i]) << functions[i];
  }
}

constexpr Way kCuda{"Cuda", "tcp", Source::kCopy, true};
INSTANTIATE_TEST_SUITE_P(Ways, CudaVersions, ::testing::Values(kCuda), [](const auto& way) { return std::string(way.param.name); });
#endif

const Way kWays[] = {
    {"ShmViews", "shm", Source::kView},
    {"ShmCopies", "shm", Source::kCopy},
    {"Tcp", "tcp", Source::kCopy},
#if PARAMWIRE_HAVE_CUDA
    kCuda,
#endif
};

INSTANTIATE_TEST_SUITE_P(Ways, EngineVersions, ::testing::ValuesIn(kWays), [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace paramwire
