#include "paramwire/compute/bert.hpp"
#include "paramwire/compute/graph.hpp"
#include "paramwire/compute/llama.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace paramwire {
namespace {

// Every part must stand in the text of a kInvalid error.
void expect_invalid(const Status& status, const std::vector<std::string>& parts) {
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Code::kInvalid);
  for (const std::string& part : parts) {
    EXPECT_NE(status.error().message().find(part), std::string::npos) << "'" << part << "' not in: " << status.error().message();
  }
}

Graph small() {
  Graph graph;
  EXPECT_TRUE(graph.embedding("in", "table", Shape{10, 8}).ok());
  EXPECT_TRUE(graph.matmul("wide", "in", "wide.weight", Shape{12, 8}).ok());
  return graph;
}

TEST(Graph, ErrorsNameOperationTensorExpectedAndActual) {
  Graph graph = small();
  expect_invalid(graph.matmul("m", "nowhere", "w", Shape{4, 8}), {"'m'", "unknown input 'nowhere'"});
  expect_invalid(graph.matmul("m", "in", "w", Shape{4, 9}), {"matmul 'm'", "'w'", "(4, 9)", "(out, 8)"});
  expect_invalid(graph.matmul("m", "in", "w", Shape{4, 2, 4}), {"'w'", "(4, 2, 4)"});
  expect_invalid(graph.matmul("wide", "in", "w", Shape{4, 8}), {"'wide'", "already has this name"});
  expect_invalid(graph.matmul("m", "in", "table", Shape{12, 8}), {"'m'", "'table'", "(12, 8)", "(10, 8)"});
  expect_invalid(graph.matmul("m", "in", "w", Shape{4, 8}, "w"), {"'m'", "both weight and bias"});
  expect_invalid(graph.matmul("m", "in", "w", Shape{4, 8}, "wide.weight"), {"'m'", "'wide.weight'", "(4,)", "(12, 8)"});
  expect_invalid(graph.matmul("", "in", "w", Shape{4, 8}), {"no name"});
  expect_invalid(graph.embedding("e", "other", Shape{11, 8}), {"'e'", "(11, 8)", "10 rows"});
  expect_invalid(graph.embedding("e", "other", Shape{0, 8}), {"'e'", "(0, 8)"});
  expect_invalid(graph.rms_norm("n", "in", "table", 1e-5), {"'n'", "'table'", "(8,)", "(10, 8)"});
  expect_invalid(graph.rms_norm("n", "in", "w", -1), {"'n'", "epsilon is -1"});
  expect_invalid(graph.add("a", "in", "wide"), {"add 'a'", "'wide' has width 12", "8"});
  expect_invalid(graph.swiglu("s", "wide", "in"), {"swiglu 's'", "'in' has width 8", "12"});
  expect_invalid(graph.softmax("s", "out"), {"unknown input 'out'"});
  expect_invalid(graph.rotary("r", "in", {3, 4, 4, 1e4, RotaryLayout::kInterleaved}), {"'r'", "width 8", "3 heads of 4"});
  expect_invalid(graph.rotary("r", "in", {2, 4, 3, 1e4, RotaryLayout::kInterleaved}), {"'r'", "rotary_size is 3"});
  expect_invalid(graph.rotary("r", "in", {2, 4, 6, 1e4, RotaryLayout::kInterleaved}), {"'r'", "rotary_size is 6"});
  expect_invalid(graph.rotary("r", "in", {2, 4, 4, 0, RotaryLayout::kInterleaved}), {"'r'", "base is 0"});
  expect_invalid(graph.attention("t", "wide", "in", "in", {3, 2, 4}), {"'t'", "3 heads", "2 kv_heads"});
  expect_invalid(graph.attention("t", "wide", "in", "in", {3, 1, 4}), {"'t'", "'in' has width 8", "1 heads of 4"});
  // A refused operation leaves nothing behind.
  EXPECT_EQ(graph.ops().size(), 2U);
  EXPECT_EQ(graph.parameters().size(), 2U);
  EXPECT_EQ(graph.caches(), 0U);
}

TEST(Graph, ErrorsOfEncoderOperationsNameOperationExpectedAndActual) {
  Graph graph = small();
  expect_invalid(graph.layer_norm("n", "in", "table", "", 1e-5), {"'n'", "'table'", "(8,)", "(10, 8)"});
  expect_invalid(graph.layer_norm("n", "in", "w", "wide.weight", 1e-5), {"'n'", "'wide.weight'", "(8,)", "(12, 8)"});
  expect_invalid(graph.layer_norm("n", "in", "w", "w", 1e-5), {"layer_norm 'n'", "both weight and bias"});
  expect_invalid(graph.layer_norm("n", "in", "w", "b", std::nan("")), {"layer_norm 'n'", "epsilon is nan"});
  expect_invalid(graph.normalise("n", "in", -1), {"normalise 'n'", "epsilon is -1"});
  expect_invalid(graph.gelu("g", "out"), {"'g'", "unknown input 'out'"});
  expect_invalid(graph.mean("in", "wide"), {"mean 'in'", "already has this name"});
  expect_invalid(graph.embedding("p", "places", Shape{0, 8}, RowsBy::kPosition), {"embedding 'p'", "(0, 8)", "(positions, width)"});
  expect_invalid(graph.embedding("p", "table", Shape{9, 8}, RowsBy::kFirst), {"'p'", "'table'", "(9, 8)", "(10, 8)"});
  EXPECT_EQ(graph.ops().size(), 2U);
  EXPECT_EQ(graph.parameters().size(), 2U);
  EXPECT_EQ(graph.positions(), 0U);
  // Tables by position and of first rows have sizes of their own; the shortest table of positions is the bound.
  EXPECT_TRUE(graph.embedding("p", "places", Shape{20, 8}, RowsBy::kPosition).ok());
  EXPECT_TRUE(graph.embedding("q", "other places", Shape{7, 8}, RowsBy::kPosition).ok());
  EXPECT_TRUE(graph.embedding("t", "types", Shape{2, 8}, RowsBy::kFirst).ok());
  EXPECT_EQ(graph.vocabulary(), 10U);
  EXPECT_EQ(graph.positions(), 7U);
}

TEST(Graph, ErrorsOfExpertOperationsNameOperationExpectedAndActual) {
  Graph graph = small();
  ASSERT_TRUE(graph.head("last", "in", "last.weight", Shape{8, 8}).ok());
  ASSERT_TRUE(graph.matmul("vast", "in", "vast.weight", Shape{1025, 8}).ok());
  expect_invalid(graph.top_k("r", "in", 0), {"top_k 'r'", "k is 0", "8 experts of 'in'"});
  expect_invalid(graph.top_k("r", "in", 9), {"k is 9", "1 to the 8"});
  expect_invalid(graph.top_k("r", "vast", 2), {"'vast' has width 1025", "at most 1024"});
  ASSERT_TRUE(graph.top_k("r", "in", 3).ok());
  ASSERT_TRUE(graph.top_k("one", "last", 3).ok());
  expect_invalid(graph.expert_matmul("e", "in", "wide", "w", Shape{8, 5, 8}), {"expert_matmul 'e'", "'wide' is a matmul", "expected a top_k"});
  expect_invalid(graph.expert_matmul("e", "in", "one", "w", Shape{8, 5, 8}), {"'e'", "'in' and 'one'", "one row only"});
  expect_invalid(graph.expert_matmul("e", "in", "r", "w", Shape{8, 8}), {"'w'", "(8, 8)", "(8, out, 8)"});
  expect_invalid(graph.expert_matmul("e", "in", "r", "w", Shape{7, 5, 8}), {"'w'", "(7, 5, 8)", "(8, out, 8)", "'r'", "'in'"});
  expect_invalid(graph.expert_matmul("e", "in", "r", "w", Shape{8, 0, 8}), {"(8, 0, 8)"});
  expect_invalid(graph.expert_matmul("e", "in", "r", "table", Shape{8, 5, 8}), {"'table'", "(8, 5, 8)", "(10, 8)"});
  expect_invalid(graph.expert_combine("e", "in", "r", "w", Shape{8, 5, 8}), {"expert_combine 'e'", "width 8", "multiple of the 3 slots"});
  expect_invalid(graph.expert_combine("e", "wide", "r", "w", Shape{8, 5, 8}), {"(8, 5, 8)", "(8, out, 4)"});
  EXPECT_EQ(graph.parameters().size(), 4U);
  ASSERT_TRUE(graph.expert_matmul("e", "in", "r", "w", Shape{8, 4, 8}).ok());
  EXPECT_EQ(graph.ops().back().width, 12U);
  ASSERT_TRUE(graph.expert_combine("c", "e", "r", "v", Shape{8, 9, 4}).ok());
  EXPECT_EQ(graph.ops().back().width, 9U);
}

TEST(Graph, NothingThatNeedsAllPositionsStandsBehindAHeadOrAMean) {
  Graph graph = small();
  ASSERT_TRUE(graph.head("last", "in", "head.weight", Shape{8, 8}).ok());
  expect_invalid(graph.add("a", "last", "in"), {"'a'", "one row only"});
  expect_invalid(graph.rotary("r", "last", {2, 4, 4, 1e4, RotaryLayout::kInterleaved}), {"'r'", "one row only"});
  expect_invalid(graph.attention("t", "last", "last", "last", {2, 2, 4}), {"'t'", "one row only"});
  EXPECT_TRUE(graph.softmax("s", "last").ok());
  ASSERT_TRUE(graph.mean("middle", "in").ok());
  expect_invalid(graph.mean("m", "middle"), {"mean 'm'", "'middle' has one row only"});
  expect_invalid(graph.attention("t", "middle", "in", "in", {2, 2, 4, false}), {"'t'", "'middle' has one row only"});
  EXPECT_FALSE(graph.whole_text());
  EXPECT_TRUE(graph.add("sum", "last", "middle").ok());
  EXPECT_TRUE(graph.normalise("n", "sum").ok());
}

TEST(Graph, BindListsEveryFaultInOneError) {
  Graph graph = small();
  ASSERT_TRUE(graph.rms_norm("norm", "wide", "norm.weight", 1e-5).ok());
  ASSERT_TRUE(graph.head("out", "norm", "out.weight", Shape{10, 12}).ok());
  const std::vector<TensorInfo> tensors = {{"table", DType::kI32, Shape{10, 8}},
                                           {"wide.weight", DType::kBF16, Shape{12, 9}},
                                           {"norm.weight", DType::kF32, Shape{12}},
                                           {"unused", DType::kU8, Shape{1}}};
  const Result<Binding> binding = graph.bind(tensors);
  ASSERT_FALSE(binding.ok());
  expect_invalid(Status(binding.error()), {"'table' of embedding 'in' has dtype i32", "bf16, f16 or f32",
                                           "'wide.weight' of matmul 'wide' has shape (12, 9), expected (12, 8)",
                                           "'out.weight' of head 'out' is missing, expected shape (10, 12)"});
  EXPECT_EQ(binding.error().message().find("norm.weight"), std::string::npos);
}

TEST(Graph, BindRefusesAGraphWithoutAnEndOrABeginning) {
  const std::vector<TensorInfo> tensors = {{"table", DType::kF32, Shape{10, 8}}, {"wide.weight", DType::kF32, Shape{12, 8}}};
  expect_invalid(Status(small().bind(tensors).error()), {"'wide'", "end with a head or a mean"});
  expect_invalid(Status(Graph().bind(tensors).error()), {"no embedding"});
  Graph graph = small();
  ASSERT_TRUE(graph.head("out", "wide", "out.weight", Shape{10, 12}).ok());
  const std::vector<TensorInfo> twice(2, {"table", DType::kF32, Shape{10, 8}});
  expect_invalid(Status(graph.bind(twice).error()), {"name twice"});
}

TEST(Graph, NeedsComeInTheOrderOfComputationWithTheirBytes) {
  Graph graph = small();
  ASSERT_TRUE(graph.matmul("biased", "wide", "biased.weight", Shape{8, 12}, "biased.bias").ok());
  ASSERT_TRUE(graph.head("out", "biased", "table", Shape{10, 8}).ok());  // tied
  const std::vector<TensorInfo> tensors = {{"table", DType::kBF16, Shape{10, 8}},
                                           {"wide.weight", DType::kF16, Shape{12, 8}},
                                           {"biased.weight", DType::kF32, Shape{8, 12}},
                                           {"biased.bias", DType::kF32, Shape{8}}};
  const Result<Binding> binding = graph.bind(tensors);
  ASSERT_TRUE(binding.ok()) << binding.error().message();
  std::vector<std::string> order;
  for (const Need& need : binding->needs()) order.push_back(need.tensor);
  EXPECT_EQ(order, (std::vector<std::string>{"table", "wide.weight", "biased.bias", "biased.weight", "table"}));
  EXPECT_EQ(binding->needs()[0].access, Access::kRowsByData);
  EXPECT_EQ(binding->needs()[4].access, Access::kWhole);
  EXPECT_EQ(binding->needs()[0].row_bytes, 16U);
  EXPECT_EQ(binding->needs()[2].row_bytes, 4U);
  EXPECT_EQ(binding->needs()[3].bytes(), 8U * 12 * 4);
  EXPECT_EQ(binding->bytes_per_step(), 12U * 8 * 2 + 8 * 4 + 8 * 12 * 4 + 10 * 8 * 2);
  EXPECT_EQ(binding->output_width(), 10U);
}

LlamaConfig tiny() {
  LlamaConfig config;
  config.layers = 2;
  config.width = 12;
  config.ffn_width = 20;
  config.vocabulary = 30;
  config.heads = 6;
  config.kv_heads = 2;
  return config;
}

TEST(LlamaGraph, NamesFollowTheFilesThatTheyComeFrom) {
  LlamaConfig config = tiny();
  Graph graph = *llama_graph(config, Naming::kGguf);
  EXPECT_EQ(graph.parameters()[0].name, "token_embd.weight");
  EXPECT_EQ(graph.parameters()[1].name, "blk.0.attn_norm.weight");
  EXPECT_EQ(graph.parameters()[2].name, "blk.0.attn_q.weight");
  EXPECT_EQ(graph.parameters()[3].shape, (Shape{4, 12}));  // attn_k: 2 heads of 2
  EXPECT_EQ(graph.parameters()[9].name, "blk.0.ffn_down.weight");
  EXPECT_EQ(graph.parameters()[9].shape, (Shape{12, 20}));
  EXPECT_EQ(graph.parameters().back().name, "output.weight");
  EXPECT_EQ(graph.parameters().size(), 1U + 2 * 9 + 2);
  EXPECT_EQ(graph.caches(), 2U);

  config.tied_head = true;
  config.attention_bias = true;
  graph = *llama_graph(config, Naming::kHuggingFace);
  EXPECT_EQ(graph.parameters()[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(graph.parameters()[2].name, "model.layers.0.self_attn.q_proj.bias");
  EXPECT_EQ(graph.parameters().back().name, "model.norm.weight");
  EXPECT_EQ(graph.parameters().size(), 1U + 2 * 13 + 1);
}

TEST(LlamaGraph, NoLayersIsAGraphToo) {
  LlamaConfig config;
  config.width = 4;
  config.vocabulary = 5;
  const Result<Graph> graph = llama_graph(config, Naming::kGguf);
  ASSERT_TRUE(graph.ok());
  EXPECT_EQ(graph->ops().size(), 3U);
}

TEST(LlamaGraph, ErrorsNameTheField) {
  LlamaConfig config = tiny();
  config.kv_heads = 4;
  expect_invalid(Status(llama_graph(config, Naming::kGguf).error()), {"kv_heads is 4", "divisor of heads 6"});
  config = tiny();
  config.heads = config.kv_heads = 5;
  expect_invalid(Status(llama_graph(config, Naming::kGguf).error()), {"heads is 5", "width 12"});
  config = tiny();
  config.ffn_width = 0;
  expect_invalid(Status(llama_graph(config, Naming::kGguf).error()), {"ffn_width is 0"});
  config.vocabulary = 0;
  expect_invalid(Status(llama_graph(config, Naming::kGguf).error()), {"vocabulary is 0"});
}

BertConfig small_bert() {
  BertConfig config;
  config.layers = 2;
  config.width = 12;
  config.ffn_width = 20;
  config.vocabulary = 30;
  config.heads = 3;
  config.positions = 16;
  return config;
}

TEST(BertGraph, NamesFollowTheFilesThatTheyComeFrom) {
  Graph graph = *bert_graph(small_bert(), Naming::kHuggingFace);
  EXPECT_EQ(graph.parameters()[0].name, "embeddings.word_embeddings.weight");
  EXPECT_EQ(graph.parameters()[1].name, "embeddings.token_type_embeddings.weight");
  EXPECT_EQ(graph.parameters()[1].shape, (Shape{2, 12}));
  EXPECT_EQ(graph.parameters()[2].name, "embeddings.position_embeddings.weight");
  EXPECT_EQ(graph.parameters()[3].name, "embeddings.LayerNorm.bias");
  EXPECT_EQ(graph.parameters()[6].name, "encoder.layer.0.attention.self.query.weight");
  EXPECT_EQ(graph.parameters().back().name, "encoder.layer.1.output.LayerNorm.weight");
  EXPECT_EQ(graph.parameters().size(), 5U + 2 * 16);
  EXPECT_EQ(graph.caches(), 0U);
  EXPECT_TRUE(graph.whole_text());
  EXPECT_EQ(graph.positions(), 16U);
  EXPECT_EQ(graph.ops().back().kind, OpKind::kMean);

  BertConfig config = small_bert();
  config.normalise = true;
  graph = *bert_graph(config, Naming::kGguf);
  EXPECT_EQ(graph.parameters()[0].name, "token_embd.weight");
  EXPECT_EQ(graph.parameters()[6].name, "blk.0.attn_q.weight");
  EXPECT_EQ(graph.parameters().back().name, "blk.1.layer_output_norm.weight");
  EXPECT_EQ(graph.ops().back().kind, OpKind::kNormalise);
}

TEST(BertGraph, ErrorsNameTheField) {
  const auto refused = [](auto change) {
    BertConfig config = small_bert();
    change(config);
    return Status(bert_graph(config, Naming::kHuggingFace).error());
  };
  expect_invalid(refused([](BertConfig& config) { config.heads = 5; }), {"bert config", "heads is 5", "divisor of width 12"});
  expect_invalid(refused([](BertConfig& config) { config.heads = 0; }), {"heads is 0"});
  expect_invalid(refused([](BertConfig& config) { config.positions = 0; }), {"positions is 0"});
  expect_invalid(refused([](BertConfig& config) { config.token_types = 0; }), {"token_types is 0"});
  expect_invalid(refused([](BertConfig& config) { config.ffn_width = 0; }), {"ffn_width is 0"});
  BertConfig config = small_bert();
  config.layers = config.heads = 0;
  EXPECT_EQ(bert_graph(config, Naming::kGguf)->ops().size(), 7U);
}

}  // namespace
}  // namespace paramwire
