// The simulation's command line.
//
//   sim_test [--seeds=N] [--first=S]       N seeds of the full profile; fails on a broken promise or on missing coverage
//   sim_test --seed=S [--trace] [--profile=NAME] [--without=CHECK]     one seed again, exactly; --trace prints what happened
//   sim_test --mutations [--seeds=N]       takes out one check at a time: within N seeds one must fail, and the same profile
//                                          with the check in must pass all those seeds
#include "sim/world.hpp"

#include "paramwire/base/env.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace paramwire::sim {
namespace {

struct Mutation {
  const char* check;
  const char* profile;
  const char* why;  // of the profile
};

constexpr Mutation kMutations[] = {
    {"crc", "full", ""},
    {"seq", "seq alone", "CRC and version would each catch a rewritten slot too (a closed slot's header names no block)"},
    {"version", "no crc", "another version's bytes fail their CRC too"},
    {"epoch", "no crc", "another incarnation's bytes fail their CRC too"},
    {"lease", "full", ""},
    {"quarantine", "full", ""},
    {"publish_fence", "blind clock", "the version clock compares the base too"},
    {"drain_first", "no datagrams", "clients that wait for datagrams hold fewer leases when a server freezes: thousands of seeds would be needed"},
    {"datagram_mac", "full", ""},
    {"replay", "full", ""},
    {"token", "full", ""},
    {"bitmap", "full", ""},
    {"status_mac", "full", ""},
    {"header_crc", "flipped headers", "a segment in the wrong place fails the block's CRC too"},
    {"incarnation", "blind greeting", "clients compare the incarnation when they greet, and another one's bytes fail their CRC too"},
};

Profile profile_named(std::string_view name) {
  Profile profile;
  profile.name = name;
  if (name == "full") return profile;
  if (name == "no datagrams") {
    profile.datagrams = false;
    return profile;
  }
  profile.corruption = false;  // the other profiles show what carries where bits do not flip
  if (name == "blind clock") {
    profile.blind_clock = true;
    return profile;
  }
  profile.readers.crc = true;
  profile.datagrams = name == "flipped headers" || name == "blind greeting";
  if (name == "flipped headers" || name == "blind greeting") {
    profile.streams = profile.one_sided = profile.lying_proxy = profile.rebased = false;
    profile.flipped_headers = name == "flipped headers";
    profile.blind_greeting = name == "blind greeting";
    return profile;
  }
  profile.equal_epochs = false;
  if (name == "seq alone") {
    profile.readers.version = true;
    profile.streams = profile.lying_proxy = profile.rebased = false;
  }
  return profile;
}

// One seed in so many is run again, and must do exactly the same.
constexpr std::uint64_t kTwiceEvery = 128;

bool known_profile(std::string_view name) { return name == "full" || name == "no crc" || name == "seq alone" || name == "blind clock" || name == "no datagrams" || name == "flipped headers" || name == "blind greeting"; }

bool take_out(Profile& profile, std::string_view check) {
  if (check == "crc") profile.readers.crc = true;
  else if (check == "seq") profile.readers.seq = true;
  else if (check == "version") profile.readers.version = true;
  else if (check == "epoch") profile.readers.epoch = true;
  else if (check == "lease") profile.store.lease = true;
  else if (check == "quarantine") profile.store.quarantine = true;
  else if (check == "publish_fence") profile.store.publish_fence = true;
  else if (check == "drain_first") profile.tick_first = true;
  else if (check == "datagram_mac") profile.server_datagrams.mac = true;
  else if (check == "replay") profile.server_datagrams.replay = true;
  else if (check == "token") profile.server_datagrams.token = true;
  else if (check == "bitmap") profile.server_datagrams.bitmap = true;
  else if (check == "incarnation") profile.server_datagrams.incarnation = true;
  else if (check == "status_mac") profile.client_datagrams.status_mac = true;
  else if (check == "header_crc") profile.client_datagrams.header_crc = true;
  else return false;
  return true;
}

// The first seed of [first, first + count) that breaks a promise.
std::optional<std::uint64_t> first_failure(const Profile& profile, std::uint64_t first, std::uint64_t count, Coverage& coverage, std::string& failure) {
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    World world(seed, profile, coverage, false);
    if (!world.run()) {
      failure = world.failure();
      return seed;
    }
    if (seed % kTwiceEvery != 0) continue;
    Coverage unused;
    World again(seed, profile, unused, false);
    static_cast<void>(again.run());
    if (again.fingerprint() == world.fingerprint()) continue;
    failure = "a second run of the seed differed from the first";
    return seed;
  }
  return std::nullopt;
}

int run_seeds(std::uint64_t first, std::uint64_t count) {
  const Micros since = steady_clock().now();
  Coverage coverage;
  std::string failure;
  const auto failed = first_failure(profile_named("full"), first, count, coverage, failure);
  if (failed) {
    std::printf("seed %llu: %s\nagain: sim_test --seed=%llu --trace\n", static_cast<unsigned long long>(*failed), failure.c_str(), static_cast<unsigned long long>(*failed));
    return 1;
  }
  coverage.print();
  const double seconds = static_cast<double>(steady_clock().now() - since) / 1e6;
  std::printf("%llu seeds from %llu passed, %.0f a second\n", static_cast<unsigned long long>(count), static_cast<unsigned long long>(first), static_cast<double>(count) / seconds);
  // Fewer seeds than this cannot be asked to reach every rare corner.
  constexpr std::uint64_t kCoverageSeeds = 5000;
  return count < kCoverageSeeds || coverage.complete() ? 0 : 1;
}

int run_one(std::uint64_t seed, const Profile& profile, bool trace) {
  Coverage coverage;
  World world(seed, profile, coverage, trace), again(seed, profile, coverage, false);
  const bool passed = world.run();
  const bool same = again.run() == passed && again.fingerprint() == world.fingerprint() && again.failure() == world.failure();
  std::fputs(world.log().c_str(), stdout);
  std::printf("seed %llu, profile %s: %s%s\n", static_cast<unsigned long long>(seed), profile.name.c_str(), passed ? "passed" : world.failure().c_str(),
              same ? "" : "; A SECOND RUN DIFFERED");
  return passed && same ? 0 : 1;
}

int run_mutations(std::uint64_t count) {
  int result = 0;
  std::printf("%-14s %-15s %-8s caught by\n", "check out", "profile", "seed");
  for (const Mutation& mutation : kMutations) {
    Coverage coverage;
    std::string failure;
    Profile mutated = profile_named(mutation.profile);
    take_out(mutated, mutation.check);
    const auto caught = first_failure(mutated, 1, count, coverage, failure);
    if (!caught) {
      std::printf("%-14s %-15s %-8s NO SEED OF %llu FAILED\n", mutation.check, mutation.profile, "-", static_cast<unsigned long long>(count));
      result = 1;
      continue;
    }
    std::printf("%-14s %-15s %-8llu %s\n", mutation.check, mutation.profile, static_cast<unsigned long long>(*caught), failure.c_str());
    if (*mutation.why != '\0') std::printf("%-39s why this profile: %s\n", "", mutation.why);
    const auto false_alarm = first_failure(profile_named(mutation.profile), 1, *caught, coverage, failure);
    if (false_alarm) {
      std::printf("%-14s FALSE ALARM: with the check in, seed %llu fails too: %s\n", mutation.check, static_cast<unsigned long long>(*false_alarm), failure.c_str());
      result = 1;
    }
  }
  // Every profile holds by itself, over more seeds than any mutation needed.
  for (const char* name : {"no crc", "seq alone", "blind clock", "flipped headers", "blind greeting"}) {
    Coverage coverage;
    std::string failure;
    const auto failed = first_failure(profile_named(name), 1, count, coverage, failure);
    std::printf("profile %-15s %llu seeds with its checks in: %s\n", name, static_cast<unsigned long long>(count),
                failed ? (std::to_string(*failed) + " FAILED: " + failure).c_str() : "passed");
    if (failed) result = 1;
  }
  return result;
}

}  // namespace
}  // namespace paramwire::sim

int main(int argc, char** argv) {
  using namespace paramwire::sim;
  std::uint64_t seeds = 1000, first = 1;
  std::optional<std::uint64_t> seed;
  bool trace = false, mutations = false;
  std::string profile_name = "full", without;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    const auto value = [&](std::string_view name) { return argument.starts_with(name) ? argv[i] + name.size() : nullptr; };
    if (const char* n = value("--seeds=")) seeds = std::strtoull(n, nullptr, 10);
    else if (const char* s = value("--seed=")) seed = std::strtoull(s, nullptr, 10);
    else if (const char* f = value("--first=")) first = std::strtoull(f, nullptr, 10);
    else if (const char* p = value("--profile=")) profile_name = p;
    else if (const char* w = value("--without=")) without = w;
    else if (argument == "--trace") trace = true;
    else if (argument == "--mutations") mutations = true;
    else return std::printf("usage: sim_test [--seeds=N] [--first=S] | --seed=S [--trace] [--profile=NAME] [--without=CHECK] | --mutations [--seeds=N]\n"), 2;
  }
  if (!known_profile(profile_name)) return std::printf("profiles: full, no datagrams, no crc, seq alone, blind clock, flipped headers, blind greeting\n"), 2;
  Profile profile = profile_named(profile_name);
  if (!without.empty() && !take_out(profile, without)) return std::printf("checks: crc, seq, version, epoch, lease, quarantine, publish_fence, drain_first, datagram_mac, replay, token, bitmap, status_mac, header_crc, incarnation\n"), 2;
  if (mutations) return run_mutations(seeds);
  return seed ? run_one(*seed, profile, trace) : run_seeds(first, seeds);
}
