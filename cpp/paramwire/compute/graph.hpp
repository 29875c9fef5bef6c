// Graph: a small checked list of operations with named parameter inputs, and the order in which it needs them.
//
// A graph holds shapes and names, never parameter bytes. Every operation makes one value, float32 [tokens, width], that
// later operations name by the operation's own name. A value behind a head or a mean has one row: the last position of the
// step, or what all of them have in common.
//
// Life of a graph: add operations in the order of computation (each checked as it comes), then bind() it to the tensors
// that a snapshot really holds. The Binding is what engines walk and what backends run.
//
// threads: plain values; one thread builds, any thread reads.
#pragma once

#include "paramwire/base/error.hpp"
#include "paramwire/base/types.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace paramwire {

// Token ids, as in GGUF's and Hugging Face's vocabularies.
using Token = std::uint32_t;

enum class OpKind : std::uint8_t {
  kEmbedding,      // rows of a table [rows, width], chosen by RowsBy
  kMatmul,         // x W^T (+ bias), W [out, in]
  kRmsNorm,        // x / sqrt(mean(x^2) + epsilon) * w
  kLayerNorm,      // (x - mean(x)) / sqrt(variance + epsilon) * w (+ bias); variance = mean((x - mean(x))^2)
  kRotary,         // rotates pairs of each head by position
  kAttention,      // grouped heads; causal over the session's key/value cache, or bidirectional over the step
  kSwiGlu,         // silu(gate) * up
  kGelu,           // x times the cumulative normal distribution at x, see Gelu
  kAdd,            // a + b
  kSoftmax,        // along the width
  kMean,           // of all positions of the step: one row
  kNormalise,      // x / max(|x|, epsilon), |x| the Euclidean norm of a row
  kTopK,           // scores [experts] -> routing [2 k]: the k experts of the largest scores, and their weights
  kExpertMatmul,   // x W[e]^T for each expert e of the routing, side by side: [k * out], W [experts, out, in]
  kExpertCombine,  // the sum over the routing's slots j of weight j * x_j W[e_j]^T, x = [x_0 ... x_(k-1)]: [out]
  kHead,           // kMatmul of the last position alone, onto the vocabulary
};
// "matmul", "rms_norm", ...: the words used in errors and in Python.
std::string_view op_kind_name(OpKind kind) noexcept;

// Whether it reads the experts that a routing names.
constexpr bool is_expert(OpKind kind) noexcept { return kind == OpKind::kExpertMatmul || kind == OpKind::kExpertCombine; }

// How an operation reads a parameter.
enum class Access : std::uint8_t {
  kWhole,       // every row once a step, in order, in pieces of any size
  kRowsByData,  // only the rows that this step's tokens, positions or routing name
};

// Which row of its table an embedding takes for a token of the step.
enum class RowsBy : std::uint8_t {
  kToken,     // the token's id
  kPosition,  // its position: row 0 is the first position of the text
  kFirst,     // row 0, for every token: the type of BERT's first sentence
};

enum class Gelu : std::uint8_t {
  kExact,  // x / 2 * (1 + erf(x / sqrt(2)))
  kTanh,   // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))); source: Hendrycks and Gimpel, arXiv 1606.08415
};

// Which elements of a head make a pair. In both, pair i of a head turns by position * base^(-2 i / size).
enum class RotaryLayout : std::uint8_t {
  kInterleaved,  // (2 i, 2 i + 1): GGUF files of Llama-shaped models (llama.cpp permutes q and k when it converts)
  kHalfSplit,    // (i, i + size / 2): Hugging Face checkpoints
};

struct RotaryOptions {
  std::uint32_t heads = 0;
  std::uint32_t head_size = 0;    // elements of one head
  std::uint32_t rotary_size = 0;  // leading elements of each head that are rotated; even, at most head_size
  double base = 10000.0;
  RotaryLayout layout = RotaryLayout::kInterleaved;
};

// Query head h reads key/value head h / (heads / kv_heads). Scores are scaled by 1 / sqrt(head_size).
struct AttentionOptions {
  std::uint32_t heads = 0;
  std::uint32_t kv_heads = 0;  // a divisor of heads
  std::uint32_t head_size = 0;
  // true: a position sees itself and all before it. false: all positions of the step see each other, nothing is cached, and
  // a text is one step: it begins at position 0.
  bool causal = true;
};

// Most experts of a top_k. Their numbers travel as float32, exactly; a device holds a row of scores in one block's shared memory.
inline constexpr std::uint64_t kExpertsMax = 1024;

// One operation as the graph holds it; read-only for everyone else. Indices point into Graph::ops() and parameters().
struct Op {
  std::string name;
  OpKind kind = OpKind::kAdd;
  std::vector<std::uint32_t> inputs = {};      // ops whose values are read; always earlier ones
  std::vector<std::uint32_t> parameters = {};  // in the order in which they are needed (a bias before its weight)
  std::uint64_t width = 0;                     // columns of the value
  bool last_only = false;                      // one row (the last position, or a mean) instead of one a token
  double epsilon = 0;                          // kRmsNorm, kLayerNorm, kNormalise
  RotaryOptions rotary = {};                   // kRotary
  AttentionOptions attention = {};             // kAttention
  std::uint32_t cache = 0;                     // kAttention, causal: which key/value cache, counted from 0
  RowsBy rows_by = RowsBy::kToken;             // kEmbedding
  Gelu gelu = Gelu::kExact;                    // kGelu
  std::uint32_t k = 0;                         // kTopK and the expert operations: experts of each token
  bool normalise = true;                       // kTopK: the k weights sum to 1
};

struct Parameter {
  std::string name;
  Shape shape;
};

// What a snapshot says about one tensor.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
};

// One visit to a parameter, in graph order.
struct Need {
  std::uint32_t op = 0;         // index into Graph::ops()
  std::uint32_t parameter = 0;  // index into Graph::parameters() (and Op::parameters holds it)
  Access access = Access::kWhole;
  std::string tensor;
  DType dtype = DType::kF32;
  std::uint64_t rows = 0;       // of the outermost axis
  std::uint64_t row_bytes = 0;  // bytes of one row, packed; of an expert: its whole matrix
  std::uint64_t bytes() const noexcept { return rows * row_bytes; }
};

class Binding;

class Graph {
 public:
  // Each adds one operation. `name` must be new, inputs must be names of earlier operations. A tensor may be read by several
  // operations (a tied head) as long as all name the same shape. On an error the graph is unchanged.
  // errors: kInvalid naming the operation, the input or tensor, what was expected and what was given.
  Status embedding(std::string_view name, std::string_view tensor, const Shape& shape, RowsBy by = RowsBy::kToken);
  Status matmul(std::string_view name, std::string_view input, std::string_view tensor, const Shape& shape,
                std::string_view bias = {});
  Status rms_norm(std::string_view name, std::string_view input, std::string_view tensor, double epsilon);
  Status layer_norm(std::string_view name, std::string_view input, std::string_view tensor, std::string_view bias, double epsilon);
  Status rotary(std::string_view name, std::string_view input, const RotaryOptions& options);
  Status attention(std::string_view name, std::string_view query, std::string_view key, std::string_view value,
                   const AttentionOptions& options);
  Status swiglu(std::string_view name, std::string_view gate, std::string_view up);
  Status gelu(std::string_view name, std::string_view input, Gelu form = Gelu::kExact);
  Status add(std::string_view name, std::string_view left, std::string_view right);
  Status softmax(std::string_view name, std::string_view input);
  Status mean(std::string_view name, std::string_view input);
  Status normalise(std::string_view name, std::string_view input, double epsilon = 1e-12);
  // The value is a routing, [2 k]: k expert numbers (as float32), largest score first, ties to the lower number, a score that is
  // not a number behind all others; then their weights in the same order: the soft-max of the k scores (`normalise`), or their
  // part of the soft-max over all experts.
  Status top_k(std::string_view name, std::string_view scores, std::uint32_t k, bool normalise = true);
  // `shape` is (experts, out, in). Only the experts that a step's routing names are read, each once, in ascending order.
  // expert_matmul: `input` is [in], the value [k * out]. expert_combine: `input` is [k * in], slot by slot, the value [out].
  Status expert_matmul(std::string_view name, std::string_view input, std::string_view routing, std::string_view tensor, const Shape& shape);
  Status expert_combine(std::string_view name, std::string_view input, std::string_view routing, std::string_view tensor, const Shape& shape);
  Status head(std::string_view name, std::string_view input, std::string_view tensor, const Shape& shape);

  const std::vector<Op>& ops() const noexcept { return ops_; }
  const std::vector<Parameter>& parameters() const noexcept { return parameters_; }
  std::uint32_t caches() const noexcept { return caches_; }
  // Rows of the embedding by token: the first token id that is refused. 0 when the graph has no such embedding yet.
  std::uint64_t vocabulary() const noexcept { return vocabulary_; }
  // Rows of the shortest embedding by position: no text may be longer. 0 when positions have no table.
  std::uint64_t positions() const noexcept { return positions_; }
  // Whether a text must be one step: some attention is bidirectional.
  bool whole_text() const noexcept { return whole_text_; }

  // Join the graph to the tensors that exist. `tensors` may hold more than the graph needs; extra ones are no error.
  // The graph's last operation is its output and must have one row: a head, a mean, or what follows it.
  // errors: kInvalid, one text that lists every missing tensor, wrong shape and wrong dtype (bf16, f16 and f32 are right).
  Result<Binding> bind(std::span<const TensorInfo> tensors) const;

 private:
  Result<std::uint32_t> find_input(std::string_view op, std::string_view input) const;
  Status check_name(OpKind kind, std::string_view name) const;
  Status check_parameter(std::string_view op, std::string_view tensor, const Shape& shape) const;
  Status check_positions(const Op& op, std::string_view input) const;
  Result<Op> over(OpKind kind, std::string_view name, std::string_view input) const;
  std::uint32_t parameter_index(std::string_view tensor, const Shape& shape);
  Status product(OpKind kind, std::string_view name, std::string_view input, std::string_view tensor, const Shape& shape, std::string_view bias);
  Status norm(OpKind kind, std::string_view name, std::string_view input, std::string_view tensor, std::string_view bias, double epsilon);
  Status pair(OpKind kind, std::string_view name, std::string_view left, std::string_view right);
  Status experts(OpKind kind, std::string_view name, std::string_view input, std::string_view routing, std::string_view tensor, const Shape& shape);
  Status push(Op op);

  std::vector<Op> ops_;
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, std::uint32_t> op_index_;
  std::unordered_map<std::string, std::uint32_t> parameter_index_;
  std::uint32_t caches_ = 0;
  std::uint64_t vocabulary_ = 0;
  std::uint64_t positions_ = 0;
  bool whole_text_ = false;
};

// A graph and, for each visit to a parameter, how many bytes it takes. A value: copy it, keep it.
class Binding {
 public:
  const Graph& graph() const noexcept { return graph_; }
  // One step of the graph visits these in this order, whatever the tokens are.
  const std::vector<Need>& needs() const noexcept { return needs_; }
  std::uint64_t output_width() const noexcept { return graph_.ops().back().width; }
  // Bytes of all kWhole needs: what every step reads, whatever its tokens. Rows by data come on top.
  std::uint64_t bytes_per_step() const noexcept;

 private:
  friend class Graph;
  Graph graph_;
  std::vector<Need> needs_;
};

}  // namespace paramwire
