// Speed on a GPU: prints a table, and writes a JSON file for scripts. Its twin gpu_sim_bench runs the same code on the simulated device, where
// answers are checked and nothing is measured.
//
// usage: gpu_bench --json FILE [--quick] [--filter NAME]      NAME: part of a group's name
// groups: crc, decode, gemv, attention, graph, host_to_device, generation
// status: 0; 1 an answer was wrong, or something failed; 77 nothing to run on
//
// JSON: {"device": text, "driver": text, "simulated": bool, "figures": [{"name": text, "value": number, "unit": text, "baseline": text,
// "baseline_value": number or null, "ratio": number or null, "target": number or null, "correct": bool}]}; see Figure in bench.hpp.
#include "bench.hpp"

#include "gpu/json.hpp"

#include "paramwire/base/text.hpp"

#include <cstdio>
#include <string_view>

namespace paramwire::gpu {
namespace {

struct Options {
  std::string json, filter;
  bool quick = false;
};

struct Group {
  const char* name;
  Status (*run)(Bench&);
};
constexpr Group kGroups[] = {{"crc", bench_crc},     {"decode", bench_decode},                 {"gemv", bench_gemv},            {"attention", bench_attention},
                             {"graph", bench_graph}, {"host_to_device", bench_host_to_device}, {"generation", bench_generation}};

std::string optional_number(const std::optional<double>& value) { return value ? json_number(*value) : "null"; }

std::string json_of(const Bench& bench) {
  const cuda::DeviceFacts& facts = bench.bed.device->facts();
  std::string figures;
  for (const Figure& each : bench.figures()) {
    figures += cat(figures.empty() ? "" : ",\n", "{\"name\": ", json_string(each.name), ", \"value\": ", json_number(each.value), ", \"unit\": ", json_string(each.unit),
                   ", \"baseline\": ", json_string(each.baseline), ", \"baseline_value\": ", optional_number(each.baseline_value), ", \"ratio\": ", optional_number(each.ratio()),
                   ", \"target\": ", optional_number(each.target), ", \"correct\": ", each.correct, "}");
  }
  return cat("{\"device\": ", json_string(facts.name), ", \"driver\": ", json_string(cat("CUDA ", facts.driver_version / 1000, ".", facts.driver_version % 1000 / 10)),
             ", \"simulated\": ", bench.world.simulated, ", \"figures\": [\n", figures, "\n]}\n");
}

void print(const Bench& bench) {
  if (bench.world.simulated) std::printf("SIMULATED: answers only, no figure here is a speed\n");
  std::printf("%-34s %12s %-9s %8s %8s  %s\n", "figure", "value", "unit", "ratio", "target", "baseline");
  for (const Figure& each : bench.figures()) {
    const std::optional<double> ratio = each.ratio();
    std::printf("%-34s %12.4g %-9s ", each.name.c_str(), each.value, each.unit.c_str());
    if (ratio) std::printf("%8.3g ", *ratio);
    else std::printf("%8s ", "-");
    if (each.target) std::printf("%8.3g", *each.target);
    else std::printf("%8s", "-");
    std::printf("  %s%s\n", each.baseline.c_str(), each.correct ? "" : "  WRONG ANSWER");
  }
}

int fail(const std::string& why) {
  std::fprintf(stderr, "gpu_bench: %s\n", why.c_str());
  return 1;
}

int measure(World& world, const Options& options) {
  auto bed = Bed::open(world);
  if (!bed.ok()) return fail(bed.error().to_string());
  Bench bench(world, std::move(*bed), options.quick);
  bool whole = true;
  for (const Group& group : kGroups) {
    if (std::string_view(group.name).find(options.filter) == std::string_view::npos) continue;
    // What other groups find is of use all the same.
    if (const Status done = group.run(bench); !done.ok()) {
      fail(cat(group.name, ": ", done.error().to_string()));
      bench.add({.name = group.name, .unit = "failed", .correct = false});
    }
    std::fflush(stdout);
  }
  if (bench.figures().empty()) return fail(cat("no group has '", options.filter, "' in its name"));
  for (const Figure& figure : bench.figures()) whole = whole && figure.correct;
  print(bench);
  if (!write_file(options.json, json_of(bench))) return fail(cat(options.json, " can't be written"));
  for (const std::string& finding : world.findings()) return fail(finding);
  return whole ? 0 : 1;
}

}  // namespace
}  // namespace paramwire::gpu

int main(int count, char** words) {
  paramwire::gpu::Options options;
  for (int i = 1; i < count; ++i) {
    const std::string_view word = words[i];
    if (word == "--quick") options.quick = true;
    else if (word == "--json" && i + 1 < count) options.json = words[++i];
    else if (word == "--filter" && i + 1 < count) options.filter = words[++i];
    else options.json.clear(), i = count;
  }
  if (options.json.empty()) {
    std::fprintf(stderr, "usage: gpu_bench --json FILE [--quick] [--filter NAME]\n");
    return 1;
  }
  const auto world = paramwire::gpu::open_world();
  if (!world.ok()) {
    std::fprintf(stderr, "gpu_bench: nothing to run on: %s\n", world.error().to_string().c_str());
    return world.error().code() == paramwire::Code::kUnavailable ? paramwire::gpu::kSkipped : 1;
  }
  return paramwire::gpu::measure(**world, options);
}
