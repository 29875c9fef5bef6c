#include "paramwire/compute/backend.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/compute/cpu_backend.hpp"
#include "paramwire/compute/cuda_probe.hpp"
#if PARAMWIRE_HAVE_CUDA
#include "paramwire/compute/cuda_backend.hpp"
#endif

#include <charconv>

#include <algorithm>

namespace paramwire {

namespace {

// "cuda" is cuda:0. returns: nullopt for what is no such name
std::optional<int> cuda_ordinal(std::string_view spec) {
  if (spec == "cuda") return 0;
  if (!spec.starts_with("cuda:")) return std::nullopt;
  const std::string_view digits = spec.substr(5);
  int ordinal = 0;
  const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
  if (fault != std::errc() || end != digits.data() + digits.size() || ordinal < 0) return std::nullopt;
  return ordinal;
}

Availability cuda_available() {
#if PARAMWIRE_HAVE_CUDA
  return cuda_backend_available();
#else
  return cuda_unavailable(look_for_cuda(""), false);
#endif
}

Result<std::unique_ptr<Backend>> open_cuda(int ordinal) {
#if PARAMWIRE_HAVE_CUDA
  return open_cuda_backend(ordinal);
#else
  const Availability why = cuda_unavailable(look_for_cuda(""), false);
  return Error(Code::kUnavailable, cat("cuda:", ordinal, ": ", why.reason, ". ", why.next));
#endif
}

}  // namespace

namespace {
Error no_memory_of_its_own(std::string_view what) {
  return Error(Code::kUnavailable, cat(what, ": this backend keeps no weights, it computes with those that it is given; supply() others"));
}
}  // namespace

Status Session::renew(std::span<const std::size_t>) { return no_memory_of_its_own("renew"); }
Status Session::stage(std::size_t, const WeightView&) { return no_memory_of_its_own("stage"); }
Status Session::stage_same(std::size_t) { return no_memory_of_its_own("stage_same"); }
Status Session::staged() { return no_memory_of_its_own("staged"); }
Status Session::swap() { return no_memory_of_its_own("swap"); }

Status check_step(const Graph& graph, const SessionOptions& options, std::uint64_t position, std::span<const Token> tokens) {
  if (tokens.empty() || tokens.size() > options.step_tokens) {
    return Error(Code::kInvalid, cat("begin: ", tokens.size(), " tokens, expected 1 to step_tokens ", options.step_tokens));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= graph.vocabulary()) {
      return Error(Code::kInvalid, cat("begin: token ", i, " is ", tokens[i], ", expected below the vocabulary's ", graph.vocabulary()));
    }
  }
  if (graph.whole_text() && position != 0) {
    return Error(Code::kInvalid, cat("begin: ", tokens.size(), " tokens at position ", position, ", but attention is bidirectional: a text is "
                                     "one step from position 0; rewind(0) first"));
  }
  if (graph.positions() != 0 && tokens.size() > graph.positions() - std::min(position, graph.positions())) {
    return Error(Code::kInvalid, cat("begin: ", tokens.size(), " tokens at position ", position, ", but the graph's table has ",
                                     graph.positions(), " positions; give a shorter text"));
  }
  if (tokens.size() > options.context_tokens - position) {
    return Error(Code::kBackpressure, cat("begin: ", tokens.size(), " tokens after position ", position,
                                          " exceed context_tokens ", options.context_tokens,
                                          "; rewind(), or open a session with more"));
  }
  return {};
}

Status check_view(const Binding& binding, const Pending& pending, const WeightView& view) {
  const Need& need = binding.needs()[pending.need];
  const auto refuse = [&](const std::string& text) {
    return Error(Code::kInvalid, cat("supply for tensor '", need.tensor, "' of operation '", binding.graph().ops()[need.op].name,
                                     "': ", text));
  };
  if (view.tensor != need.tensor) return refuse(cat("given tensor '", view.tensor, "'"));
  if (view.dtype != need.dtype) return refuse(cat("given dtype ", dtype_name(view.dtype), ", expected ", dtype_name(need.dtype)));
  const bool begins_right = need.access == Access::kWhole ? view.row_begin == pending.next_row : view.row_begin <= pending.next_row;
  if (!begins_right || view.row_end <= pending.next_row || view.row_end > need.rows) {
    return refuse(cat("given rows [", view.row_begin, ", ", view.row_end, "), expected rows from ", pending.next_row,
                      " on, at most to ", need.rows));
  }
  const std::uint64_t bytes = (view.row_end - view.row_begin) * need.row_bytes;
  if (view.data.size() != bytes) return refuse(cat("given ", view.data.size(), " bytes, expected ", bytes));
  const std::uintptr_t element = dtype_bits(need.dtype) / 8;
  if (reinterpret_cast<std::uintptr_t>(view.data.data()) % element != 0) {
    return refuse(cat("data is not aligned to its element of ", element, " bytes"));
  }
  return {};
}

std::vector<Availability> available_backends() { return {cpu_backend_available(), cuda_available()}; }

Result<std::unique_ptr<Backend>> open_backend(std::string_view spec, const BackendOptions& options) {
  if (spec == "cpu") return open_cpu_backend(options);
  if (const auto ordinal = cuda_ordinal(spec)) return open_cuda(*ordinal);
  return Error(Code::kInvalid, cat("backend '", spec, "' is unknown; expected cpu, cuda or cuda:N"));
}

}  // namespace paramwire
