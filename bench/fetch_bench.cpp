// Fetches and views from C++ beside memcpy, plain TCP and plain UDP, server and client as two processes: one JSON object a line, to
// stdout.
//
//   fetch_bench [--transport shm|tcp|udp|all] [--seconds S] [--rotate MIB] [--sizes BYTES,BYTES,...]
//
// The records have fields of `paramwire bench fetch --json`, with "language": "c++"; udp has a record for each plain UDP program. memory "cold": source and target move on
// through --rotate MiB each (default 1024), so neither is in a cache; "warm": one block over and over. Each figure's time
// (--seconds, default 2) is cut in 8 rounds of both sides, interleaved; `ratio` is the median over the rounds. After the timed
// calls the targets are cleared, fetched once more and compared with what was published; wrong bytes end the run with status 1.
#include "plain_programs.hpp"

#include "paramwire/client/client.hpp"
#include "paramwire/server/server.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

using namespace paramwire;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMiB = 1024 * 1024;
constexpr int kRounds = 8;
constexpr std::size_t kBlocksMax = 16384;      // of one size; smaller blocks are cold in the inner caches only
constexpr std::size_t kSamplesMax = 1'000'000;  // call times kept a side: more no longer moves a percentile

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "fetch_bench: %s\n", text.c_str());
  std::exit(1);
}
template <typename T>
T need(Result<T> result) {
  if (!result) fail(result.error().to_string());
  return std::move(result).value();
}
void need(const Status& status) {
  if (!status) fail(status.error().to_string());
}

std::byte* map_region(std::size_t size) {
  void* region = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) fail("no memory for a region of " + std::to_string(size) + " bytes: lower --rotate");
  return static_cast<std::byte*>(region);
}

// The multiples of an odd constant: every block differs, and every word of it.
void fill_pattern(std::byte* region, std::size_t size) {
  for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = (at / sizeof(std::uint64_t) + 1) * 0x9E3779B97F4A7C15U;
    std::memcpy(region + at, &word, std::min(sizeof word, size - at));
  }
}

// ---------------------------------------------------------------- the server process

struct Ready {
  char address[256];
  char tcp_address[64];
  paramwire_bench::PlainPorts plain;
};

// Serves until the other end of `stop` closes.
[[noreturn]] void run_server(int ready_fd, int stop, const std::string& folder, std::size_t size, std::size_t count) {
  std::byte* region = map_region(size * count);
  fill_pattern(region, size * count);
  ServerOptions options;
  options.unix_directory = folder;
  auto server = need(Server::open(options));
  auto publish = need(server->publish());
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = "block." + std::to_string(i);
    need(publish.put({.tensor = name, .dtype = DType::kU8, .shape = {size}, .shard = Shard::whole()}, {region + i * size, size}));
  }
  need(publish.finish());

  Ready ready{};
  if (const int error = paramwire_bench::serve_plain(region, size * count, ready.plain); error != 0) {
    fail(std::string("plain servers: ") + std::strerror(error));
  }
  for (const Endpoint& endpoint : server->endpoints()) {
    const bool tcp = endpoint.kind == Endpoint::Kind::kTcp;
    char* target = tcp ? ready.tcp_address : ready.address;
    std::snprintf(target, tcp ? sizeof ready.tcp_address : sizeof ready.address, "%s", endpoint.to_string().c_str());
  }
  if (write(ready_fd, &ready, sizeof ready) != sizeof ready) fail("the parent is gone");
  char end = 0;
  while (read(stop, &end, 1) > 0) {
  }
  server->close(0);
  _exit(0);
}

// The server process, ended by the destructor.
class ServerProcess {
 public:
  ServerProcess(std::size_t size, std::size_t count) {
    folder_ = std::filesystem::temp_directory_path() / "paramwire-bench-XXXXXX";
    if (mkdtemp(folder_.data()) == nullptr) fail(std::string("mkdtemp: ") + std::strerror(errno));
    int ready[2], stop[2];
    if (pipe(ready) != 0 || pipe(stop) != 0) fail(std::string("pipe: ") + std::strerror(errno));
    pid_ = fork();
    if (pid_ < 0) fail(std::string("fork: ") + std::strerror(errno));
    if (pid_ == 0) {
      close(ready[0]);
      close(stop[1]);
      run_server(ready[1], stop[0], folder_, size, count);
    }
    close(ready[1]);
    close(stop[0]);
    stop_ = stop[1];
    if (read(ready[0], &facts, sizeof facts) != sizeof facts) fail("the server process ended before it served");
    close(ready[0]);
  }
  ~ServerProcess() {
    close(stop_);
    waitpid(pid_, nullptr, 0);
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  pid_t pid() const { return pid_; }

  Ready facts{};

 private:
  pid_t pid_ = 0;
  int stop_ = -1;
  std::string folder_;
};

// ---------------------------------------------------------------- measuring

using Call = std::function<void(std::size_t)>;

double cpu_seconds(pid_t other) {
  double sum = 0;
  clockid_t clocks[2] = {CLOCK_PROCESS_CPUTIME_ID, CLOCK_PROCESS_CPUTIME_ID};
  if (clock_getcpuclockid(other, &clocks[1]) != 0) fail("the server process has no CPU clock");
  for (const clockid_t clock : clocks) {
    timespec now{};
    clock_gettime(clock, &now);
    sum += static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  }
  return sum;
}

double percentile(std::vector<double>& values, double percent) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::ptrdiff_t>(percent / 100 * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

struct Side {
  const Call* call = nullptr;
  std::vector<double> times_us;
  std::vector<double> rounds;  // GB/s
  std::size_t at = 0;
  std::size_t calls = 0;
  double seconds = 0;

  void round(std::size_t count, std::size_t size, double duration) {
    const Clock::time_point begin = Clock::now();
    Clock::time_point now = begin;
    std::size_t done = 0;
    const auto end = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(duration));
    do {
      (*call)(at);
      const Clock::time_point after = Clock::now();
      if (times_us.size() < kSamplesMax) times_us.push_back(std::chrono::duration<double, std::micro>(after - now).count());
      now = after;
      ++done;
      at = at + 1 < count ? at + 1 : 0;
    } while (now < end);
    const double spent = std::chrono::duration<double>(now - begin).count();
    calls += done;
    seconds += spent;
    rounds.push_back(static_cast<double>(done * size) / spent * 1e-9);
  }
};

struct Case {
  std::string_view bench, transport, memory, baseline;
  std::size_t size = 0, count = 0;
  double seconds = 0;
  pid_t server = 0;
};

struct Checked {
  std::uint64_t verified = 0, retries = 0;
  bool correct = false;
};

// `null` when there is no baseline.
std::string number(double value, bool there) {
  if (!there) return "null";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6g", value);
  return text.data();
}

// Runs the rounds, then `check`, which looks at the bytes and the counters; prints the record.
void run_case(const Case& what, const Call& ours, const Call& baseline, const std::function<Checked()>& check) {
  Side one, other;
  one.call = &ours;
  other.call = &baseline;
  const bool compared = static_cast<bool>(baseline);
  double cpu = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (compared) other.round(what.count, what.size, what.seconds / kRounds / 2);
    const double before = cpu_seconds(what.server);
    one.round(what.count, what.size, what.seconds / kRounds / (compared ? 2 : 1));
    cpu += cpu_seconds(what.server) - before;
  }
  std::vector<double> ratios;
  for (int round = 0; compared && round < kRounds; ++round) {
    ratios.push_back(one.rounds[static_cast<std::size_t>(round)] / other.rounds[static_cast<std::size_t>(round)]);
  }
  const Checked checked = check();
  const auto speed = [&](const Side& side) { return static_cast<double>(side.calls * what.size) / side.seconds * 1e-9; };
  const bool moves = what.bench != "view";  // a later view moves no byte
  std::printf(
      "{\"bench\": \"%s\", \"language\": \"c++\", \"transport\": \"%s\", \"bytes\": %zu, \"memory\": \"%s\", \"rotate_bytes\": %zu, "
      "\"p50_us\": %.6g, \"p99_us\": %.6g, \"gb_per_s\": %s, \"baseline\": %s%s%s, \"baseline_p50_us\": %s, \"baseline_p99_us\": %s, "
      "\"baseline_gb_per_s\": %s, \"ratio\": %s, \"ratio_min\": %s, \"ratio_max\": %s, \"cpu_s_per_gb\": %s, \"calls\": %zu, "
      "\"verified\": %llu, \"retries\": %llu, \"correct\": %s}\n",
      what.bench.data(), what.transport.data(), what.size, what.memory.data(), what.size * what.count, percentile(one.times_us, 50),
      percentile(one.times_us, 99), number(speed(one), moves).c_str(), compared ? "\"" : "", compared ? what.baseline.data() : "null",
      compared ? "\"" : "", number(percentile(other.times_us, 50), compared).c_str(), number(percentile(other.times_us, 99), compared).c_str(),
      number(compared ? speed(other) : 0, compared).c_str(), number(percentile(ratios, 50), compared).c_str(),
      number(percentile(ratios, 0), compared).c_str(), number(percentile(ratios, 100), compared).c_str(),
      number(cpu / (static_cast<double>(one.calls * what.size) * 1e-9), moves).c_str(), one.calls,
      static_cast<unsigned long long>(checked.verified), static_cast<unsigned long long>(checked.retries), checked.correct ? "true" : "false");
  std::fflush(stdout);
  if (!checked.correct) fail("wrong bytes in the figure above");
}

// Reads every byte, as a consumer of weights does first; the sum keeps it from being optimised away.
void read_all(const std::byte* source, std::size_t size) {
  std::uint64_t sums[4] = {};
  for (std::size_t at = 0; at + 32 <= size; at += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word = 0;
      std::memcpy(&word, source + at + 8 * lane, sizeof word);
      sums[lane] += word;
    }
  }
  asm volatile("" : : "r"(sums[0] + sums[1] + sums[2] + sums[3]) : "memory");
}

// ---------------------------------------------------------------- the figures of one block size

struct Memory {
  std::byte* source;
  std::byte* target;
};

class Figures {
 public:
  Figures(const ServerProcess& server, Memory memory, std::size_t size, std::size_t count, double seconds)
      : server_(server), memory_(memory), size_(size), count_(count), seconds_(seconds) {
    for (std::size_t i = 0; i < count; ++i) names_.push_back("block." + std::to_string(i));
  }

  void run(std::string_view transport) {
    const bool shm = transport == "shm";
    ClientOptions options;
    options.transport = transport;
    const auto client = need(Client::connect(shm ? server_.facts.address : server_.facts.tcp_address, options));
    const auto snapshot = need(client->snapshot({}));
    for (const std::string_view baseline : shm ? std::vector<std::string_view>{"memcpy"} : paramwire_bench::plain_programs(transport)) {
      fetches(*client, *snapshot, transport, baseline, count_, "cold");
      fetches(*client, *snapshot, transport, baseline, 1, "warm");
    }
    if (!shm) return;
    fetches(*client, *snapshot, transport, "memcpy and read", count_, "cold");
    first_views(options);
    later_views(*client, *snapshot);
  }

 private:
  void fetch(Snapshot& snapshot, std::size_t index) {
    FetchRequest request;
    request.tensor = names_[index];
    request.target = {memory_.target + index * size_, size_};
    need(snapshot.fetch(std::span(&request, 1), {}));
  }
  void copy(std::size_t index) {
    std::memcpy(memory_.target + index * size_, memory_.source + index * size_, size_);
    asm volatile("" : : "r"(memory_.target) : "memory");
  }
  Case make_case(std::string_view bench, std::string_view transport, std::string_view memory, std::string_view baseline, std::size_t count) const {
    return {bench, transport, memory, baseline, size_, count, seconds_, server_.pid()};
  }

  void fetches(Client& client, Snapshot& snapshot, std::string_view transport, std::string_view name, std::size_t count, std::string_view memory) {
    const bool read = name == "memcpy and read";
    for (std::size_t i = 0; i < count; ++i) fetch(snapshot, i);  // the first touch of pages is nobody's figure
    const ClientStats before = client.stats();
    const Call ours = [&](std::size_t i) {
      fetch(snapshot, i);
      if (read) read_all(memory_.target + i * size_, size_);
    };
    Call baseline = [&](std::size_t i) {
      copy(i);
      if (read) read_all(memory_.target + i * size_, size_);
    };
    paramwire_bench::PlainClient plain;
    if (transport != "shm") {
      const auto must = [name](int error) {
        if (error != 0) fail(std::string(name) + ": " + std::strerror(error));
      };
      must(plain.open(name, server_.facts.plain));
      baseline = [&, must](std::size_t i) { must(plain.fetch(i * size_, memory_.target + i * size_, size_)); };
    }
    run_case(make_case(read ? "fetch_read" : "fetch", transport, memory, name, count), ours, baseline, [&] {
      const ClientStats after = client.stats();
      std::memset(memory_.target, 0, size_ * count);
      for (std::size_t i = 0; i < count; ++i) fetch(snapshot, i);
      return Checked{after.link.blocks_verified - before.link.blocks_verified, after.retries - before.retries,
                     std::memcmp(memory_.target, memory_.source, size_ * count) == 0};
    });
  }

  // What was verified is known to a client for good, so each pass over the blocks takes a fresh client, outside the clock.
  void first_views(const ClientOptions& options) {
    std::shared_ptr<Client> client;
    std::shared_ptr<Snapshot> snapshot;
    Checked checked{.correct = true};
    std::uint64_t calls = 0;
    BlockView last;
    const std::size_t count = count_;
    std::vector<double> views, copies;
    double cpu = 0;
    const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_));
    const auto timed = [](const std::function<void()>& call) {
      const Clock::time_point begin = Clock::now();
      call();
      return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    };
    while (calls == 0 || Clock::now() < end) {
      client = need(Client::connect(server_.facts.address, options));
      snapshot = need(client->snapshot({}));
      for (std::size_t i = 0; i < count && (calls == 0 || Clock::now() < end); ++i, ++calls) {
        copies.push_back(timed([&] { copy(i); }));
        const double before = cpu_seconds(server_.pid());
        views.push_back(timed([&] { last = need(snapshot->view(names_[i])); }));
        cpu += cpu_seconds(server_.pid()) - before;
        checked.verified += last.verified_now() ? 1U : 0U;
        if (i == 0) checked.correct &= std::memcmp(last.bytes().data(), memory_.source, size_) == 0;
        last.release();
      }
    }
    print_first_views(views, copies, cpu, checked);
  }

  void print_first_views(std::vector<double>& views, std::vector<double>& copies, double cpu, const Checked& checked) const {
    double view_us = 0, copy_us = 0;
    for (const double time : views) view_us += time;
    for (const double time : copies) copy_us += time;
    const double bytes = static_cast<double>(views.size() * size_);
    const bool correct = checked.correct && checked.verified == views.size();
    std::printf(
        "{\"bench\": \"first_view\", \"language\": \"c++\", \"transport\": \"shm\", \"bytes\": %zu, \"memory\": \"cold\", \"rotate_bytes\": %zu, "
        "\"p50_us\": %.6g, \"p99_us\": %.6g, \"gb_per_s\": %.6g, \"baseline\": \"memcpy\", \"baseline_p50_us\": %.6g, \"baseline_p99_us\": %.6g, "
        "\"baseline_gb_per_s\": %.6g, \"ratio\": %.6g, \"cpu_s_per_gb\": %.6g, \"calls\": %zu, \"verified\": %llu, \"retries\": 0, "
        "\"correct\": %s}\n",
        size_, size_ * count_, percentile(views, 50), percentile(views, 99), bytes / view_us * 1e-3, percentile(copies, 50),
        percentile(copies, 99), bytes / copy_us * 1e-3, copy_us / view_us, cpu / (bytes * 1e-9), views.size(),
        static_cast<unsigned long long>(checked.verified), correct ? "true" : "false");
    std::fflush(stdout);
    if (!correct) fail("wrong or unverified bytes in the figure above");
  }

  void later_views(Client& client, Snapshot& snapshot) {
    const Call ours = [&](std::size_t) { need(snapshot.view(names_[0])).release(); };
    const bool correct = std::memcmp(need(snapshot.view(names_[0])).bytes().data(), memory_.source, size_) == 0;
    const ClientStats before = client.stats();
    run_case(make_case("view", "shm", "warm", "", 1), ours, {}, [&] {
      return Checked{client.stats().link.views_verified - before.link.views_verified, client.stats().retries - before.retries, correct};
    });
  }

  const ServerProcess& server_;
  Memory memory_;
  std::size_t size_, count_;
  double seconds_;
  std::vector<std::string> names_;
};

struct Arguments {
  std::vector<std::string_view> transports = {"shm", "tcp"};
  double seconds = 2;
  std::size_t rotate = 1024 * kMiB;
  std::vector<std::size_t> sizes = {64, 4 * 1024, 64 * 1024, kMiB, 16 * kMiB, 256 * kMiB};
};

bool parse(int argc, char** argv, Arguments& arguments) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view option = argv[i], value = argv[i + 1];
    if (option == "--transport" && (value == "shm" || value == "tcp" || value == "udp")) {
      arguments.transports = {value};
    } else if (option == "--seconds") {
      arguments.seconds = std::strtod(argv[i + 1], nullptr);
    } else if (option == "--rotate") {
      arguments.rotate = std::strtoul(argv[i + 1], nullptr, 10) * kMiB;
    } else if (option == "--sizes") {
      arguments.sizes.clear();
      for (char* at = argv[i + 1]; *at != '\0'; at += *at == ',' ? 1 : 0) {
        char* end = nullptr;
        arguments.sizes.push_back(std::strtoul(at, &end, 10));
        if (end == at) return false;
        at = end;
      }
    } else if (option != "--transport" || value != "all") {
      return false;
    }
  }
  const bool sizes_fit = std::all_of(arguments.sizes.begin(), arguments.sizes.end(), [](std::size_t size) { return size > 0; });
  return argc % 2 == 1 && arguments.seconds > 0 && arguments.rotate > 0 && sizes_fit && !arguments.sizes.empty();
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) {
    std::fprintf(stderr, "usage: fetch_bench [--transport shm|tcp|udp|all] [--seconds S] [--rotate MIB] [--sizes BYTES,BYTES,...]\n");
    return 2;
  }
  for (const std::size_t size : arguments.sizes) {
    const std::size_t count = std::clamp<std::size_t>(arguments.rotate / size, 1, kBlocksMax);
    const ServerProcess server(size, count);
    const Memory memory{map_region(size * count), map_region(size * count)};
    fill_pattern(memory.source, size * count);
    std::memset(memory.target, 1, size * count);
    Figures figures(server, memory, size, count, arguments.seconds);
    for (const std::string_view transport : arguments.transports) figures.run(transport);
    munmap(memory.source, size * count);
    munmap(memory.target, size * count);
  }
  return 0;
}
