// Adversarial one-sided reads: command line.
//
//   torn_reads_test --mode=seq|crc|both [--reads=N] [--seed=S]   reads of blocks until there were N, in worlds of their own seed from S on; fails if one
//                                                                torn block is accepted, or if too few reads were torn to show anything
//   torn_reads_test --canary [--reads=N] [--seed=S]              what is known to be wrong, with CRC off: fails unless it is found out within N reads
// A finding names its seed: the same with --seed=S and --reads=1 runs that world again, exactly.
#include "torn/world.hpp"

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace paramwire::torn {
namespace {

// Of one world; a large world has as many as take about as long.
constexpr std::uint64_t kReadsAWorld = 4096, kReadsALargeWorld = 64;
// Fewer reads than this can't be asked for shares.
constexpr std::uint64_t kReadsForShares = 20'000;

const char* name_of(Checks checks) { return checks == Checks::kSeq ? "seq" : checks == Checks::kCrc ? "crc" : "both"; }
unsigned long long number(std::uint64_t value) { return value; }

struct Outcome {
  Tally tally;
  std::uint64_t seeds = 0;
  std::uint64_t found_at = 0;  // seed
  std::string finding;
  Status status;
};

Outcome run_worlds(const Plan& plan, std::uint64_t reads, std::uint64_t first) {
  Outcome out;
  for (std::uint64_t seed = first; out.tally.reads < reads && out.finding.empty() && out.status.ok(); ++seed) {
    auto world = World::make(seed, plan);
    if (!world.ok()) {
      out.status = world.error();
      break;
    }
    Tally tally;
    out.status = (*world)->run((*world)->large() ? kReadsALargeWorld : kReadsAWorld, tally);
    out.tally.add(tally);
    out.finding = (*world)->finding();
    out.found_at = seed;
    ++out.seeds;
  }
  return out;
}

void print(const char* what, const Plan& plan, const Outcome& outcome, std::uint64_t first, Micros took) {
  const Tally& tally = outcome.tally;
  std::printf("%s, %s: seeds %llu to %llu\n", what, name_of(plan.checks), number(first), number(first + outcome.seeds - 1));
  std::printf("  %llu reads of blocks in %llu RDMA READs and %llu cache lines, %llu rewrites between them, %.1f s, %.0f ns a read\n", number(tally.reads), number(tally.work_requests), number(tally.lines),
              number(tally.rewrites), static_cast<double>(took) / 1e6, 1000.0 * static_cast<double>(took) / static_cast<double>(tally.reads > 0 ? tally.reads : 1));
  std::printf("  accepted %llu, refused %llu (torn %llu, by CRC alone %llu), torn and accepted %llu\n", number(tally.accepted), number(tally.refused), number(tally.torn_refused), number(tally.corrupt),
              number(tally.torn_accepted));
}

int run_mode(Checks checks, std::uint64_t reads, std::uint64_t first) {
  const Plan plan{checks, Wrong::kNothing};
  const Micros since = steady_clock().now();
  const Outcome outcome = run_worlds(plan, reads, first);
  print("reads under a writer", plan, outcome, first, steady_clock().now() - since);
  if (!outcome.status.ok() || !outcome.finding.empty()) {
    const std::string why = outcome.finding.empty() ? outcome.status.error().to_string() : outcome.finding;
    std::printf("FAILED: seed %llu: %s\nagain: torn_reads_test --mode=%s --seed=%llu --reads=1\n", number(outcome.found_at), why.c_str(), name_of(checks), number(outcome.found_at));
    return 1;
  }
  const Tally& tally = outcome.tally;
  if (tally.reads >= kReadsForShares && (tally.accepted < tally.reads / 10 || tally.torn_refused < tally.reads / 20)) {
    std::printf("FAILED: fewer than a tenth accepted, or fewer than a twentieth torn: such a run shows little\n");
    return 1;
  }
  return 0;
}

int run_canary(std::uint64_t reads, std::uint64_t first) {
  int result = 0;
  const std::pair<Wrong, const char*> canaries[] = {{Wrong::kHeaderWithPayload, "a header asked for with its payload"}, {Wrong::kEarlyWriter, "a payload begun before seq is odd"}};
  for (const auto& [wrong, what] : canaries) {
    const Plan plan{Checks::kSeq, wrong};
    const Micros since = steady_clock().now();
    const Outcome outcome = run_worlds(plan, reads, first);
    print(what, plan, outcome, first, steady_clock().now() - since);
    if (outcome.tally.torn_accepted > 0) {
      std::printf("  found out at seed %llu: %s\n", number(outcome.found_at), outcome.finding.c_str());
      continue;
    }
    std::printf("FAILED: NOT FOUND OUT%s%s\n", outcome.status.ok() ? "" : ": ", outcome.status.ok() ? "" : outcome.status.error().to_string().c_str());
    result = 1;
  }
  return result;
}

int usage() { return std::printf("usage: torn_reads_test --mode=seq|crc|both | --canary [--reads=N] [--seed=S]\n"), 2; }

}  // namespace
}  // namespace paramwire::torn

int main(int argc, char** argv) {
  using namespace paramwire::torn;
  std::uint64_t reads = 100'000, first = 1;
  std::string_view mode;
  bool canary = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    const auto value = [&](std::string_view name) { return argument.starts_with(name) ? argv[i] + name.size() : nullptr; };
    if (const char* n = value("--reads=")) reads = std::strtoull(n, nullptr, 10);
    else if (const char* s = value("--seed=")) first = std::strtoull(s, nullptr, 10);
    else if (const char* m = value("--mode=")) mode = m;
    else if (argument == "--canary") canary = true;
    else return usage();
  }
  if (reads == 0 || canary != mode.empty()) return usage();
  if (canary) return run_canary(reads, first);
  if (mode == "seq") return run_mode(Checks::kSeq, reads, first);
  if (mode == "crc") return run_mode(Checks::kCrc, reads, first);
  return mode == "both" ? run_mode(Checks::kBoth, reads, first) : usage();
}
