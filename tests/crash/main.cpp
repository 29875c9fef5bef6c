// Saves that are killed: a process saves the next version into a real directory and gets SIGKILL before, after or in the middle of one of its
// system calls. What is left must be the version before or the new one, whole, and the next save must work and take the leftovers away.
//
// usage: checkpoint_kill_test [--points=200] [--seed=N]
#include "support/checkpoint_model.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/store/checkpoint.hpp"

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

namespace paramwire {
namespace {

using testing::ModelSink;
using testing::ModelSource;

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "FAILED: %s\n", text.c_str());
  std::exit(1);
}

// The kernel's file system, with one call at which this process is killed.
class KillingFiles final : public FileSystem {
 public:
  enum class When { kBefore, kAfter, kWithin };
  KillingFiles(std::uint64_t at, When when) : at_(at), when_(when) {}
  std::uint64_t calls() const { return calls_; }

  int open(const std::string& path, int flags, unsigned mode) override {
    return around([&] { return real_.open(path, flags, mode); });
  }
  void close(int fd) override { real_.close(fd); }
  std::int64_t pread(int fd, std::span<std::byte> target, std::uint64_t offset) override {
    return around([&] { return real_.pread(fd, target, offset); });
  }
  std::int64_t pwrite(int fd, std::span<const std::byte> source, std::uint64_t offset) override {
    if (when_ == When::kWithin && calls_ + 1 == at_) {  // half of the bytes
      real_.pwrite(fd, source.first(source.size() / 2), offset);
      die();
    }
    return around([&] { return real_.pwrite(fd, source, offset); });
  }
  std::int64_t size(int fd) override {
    return around([&] { return real_.size(fd); });
  }
  int truncate(int fd, std::uint64_t size) override {
    return around([&] { return real_.truncate(fd, size); });
  }
  // No fsync: a killed process loses nothing that it wrote, and 200 saves with it would take minutes on a slow disk. Lost power is checkpoint_test's.
  int sync(int) override {
    return around([] { return 0; });
  }
  void start_writing(int, std::uint64_t, std::uint64_t) override {}
  int rename(const std::string& from, const std::string& to) override {
    return around([&] { return real_.rename(from, to); });
  }
  int unlink(const std::string& path) override {
    return around([&] { return real_.unlink(path); });
  }
  int make_directory(const std::string& path, unsigned mode) override {
    return around([&] { return real_.make_directory(path, mode); });
  }
  int list(const std::string& path, std::vector<std::string>& names) override {
    return around([&] { return real_.list(path, names); });
  }
  int lock(int fd, bool exclusive) override {
    return around([&] { return real_.lock(fd, exclusive); });
  }
  void unlock(int fd) override { real_.unlock(fd); }
  std::int64_t free_bytes(const std::string& path) override { return real_.free_bytes(path); }

 private:
  [[noreturn]] static void die() {
    std::raise(SIGKILL);
    std::abort();  // never reached
  }
  template <typename Call>
  auto around(Call call) -> decltype(call()) {
    const std::uint64_t number = ++calls_;
    if (number == at_ && when_ != When::kAfter) die();
    const auto result = call();
    if (number == at_) die();
    return result;
  }

  FileSystem& real_ = posix_files();
  const std::uint64_t at_;
  const When when_;
  std::atomic<std::uint64_t> calls_{0};
};

class Run {
 public:
  Run(std::uint64_t seed, std::string directory) : random_(seed), directory_(std::move(directory)) {
    model_.fill(random_);
    options_.keep = 2;
    options_.full_every = 3;
    must_save();
    before_ = blocks();
  }

  // One point: the next version, killed; what is left; then the same version again, or the one after it.
  void point(std::uint64_t number) {
    model_.step(random_, 60);
    const std::uint64_t at = 1 + random_.below(calls_);
    const auto when = static_cast<KillingFiles::When>(random_.below(3));
    const bool killed = save_in_child(at, when);
    const std::string where = cat("point ", number, ", killed at call ", at, " of ", calls_);
    killed_ += killed ? 1 : 0;
    const Version found = newest(where);
    const bool is_new = found == model_.version();
    if (!is_new && (found.counter + 1 != model_.version().counter || !killed)) fail(cat(where, ": the newest is ", found));
    new_ += is_new ? 1 : 0;
    expect(is_new ? blocks() : before_, where);
    if (random_.chance(50)) model_.step(random_, 60);  // nobody takes up what the killed one left
    const CheckpointSaved saved = must_save();
    resumed_ += saved.blocks_resumed > 0 ? 1 : 0;
    expect(blocks(), where);
    if (number % 8 == 0) verify(where);
    before_ = blocks();
  }

  void report(std::uint64_t points) const {
    std::printf("%llu points: %llu killed, %llu left the new version, %llu saves went on with what was left\n", static_cast<unsigned long long>(points),
                static_cast<unsigned long long>(killed_), static_cast<unsigned long long>(new_), static_cast<unsigned long long>(resumed_));
    // A run that kills nothing, or always at the same end, would prove nothing.
    if (killed_ < points / 2 || new_ == 0 || new_ == points || (points >= 100 && resumed_ == 0)) fail("the points were not spread over the save");
  }

 private:
  using Blocks = std::map<std::string, std::vector<std::byte>>;
  Blocks blocks() {
    Blocks out;
    for (const auto& [key, block] : model_.blocks()) out[block.shard.kind == ShardKind::kWhole ? block.tensor : cat(block.tensor, '[', block.shard, ']')] = block.bytes;
    return out;
  }
  // returns: whether it was killed; a save may have fewer calls.
  bool save_in_child(std::uint64_t at, KillingFiles::When when) {
    const pid_t child = ::fork();
    if (child < 0) fail("fork");
    if (child == 0) {
      KillingFiles files(at, when);
      const auto saved = save_checkpoint(directory_, model_, options_, files);
      if (!saved.ok()) std::fprintf(stderr, "%s\n", saved.error().message().c_str());
      ::_exit(saved.ok() ? 0 : 1);
    }
    int status = 0;
    if (::waitpid(child, &status, 0) != child) fail("waitpid");
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return true;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail("the save failed by itself");
    return false;
  }
  Version newest(const std::string& where) const {
    const auto found = Checkpoint::open(directory_, std::nullopt, posix_files());
    if (!found.ok()) fail(cat(where, ": ", found.error().message()));
    if (!(*found)->notes().empty()) fail(cat(where, ": ", (*found)->notes().front()));
    return *(*found)->manifest().version();
  }
  void expect(const Blocks& wanted, const std::string& where) const {
    const auto found = Checkpoint::open(directory_, std::nullopt, posix_files());
    if (!found.ok()) fail(cat(where, ": ", found.error().message()));
    ModelSink sink((*found)->manifest());
    const Status restored = restore_checkpoint(**found, sink, {});
    if (!restored.ok()) fail(cat(where, ": ", restored.error().message()));
    if (sink.blocks != wanted) fail(cat(where, ": version ", to_text((*found)->manifest().version()), " came back with other bytes"));
  }
  void verify(const std::string& where) const {
    const auto verified = verify_checkpoints(directory_, {.decode = true}, posix_files());
    if (!verified.ok()) fail(cat(where, ": ", verified.error().message()));
    if (!verified->problems.empty()) fail(cat(where, ": ", verified->problems.front().file, ": ", verified->problems.front().text));
    std::vector<std::string> names;
    posix_files().list(directory_, names);
    for (const std::string& name : names) {
      if (name.ends_with(".tmp")) fail(cat(where, ": ", name, " is left after a save that was finished"));
    }
  }
  CheckpointSaved must_save() {
    KillingFiles files(0, KillingFiles::When::kBefore);
    auto saved = save_checkpoint(directory_, model_, options_, files);
    if (!saved.ok()) fail(saved.error().message());
    if (!saved->existed) calls_ = std::max<std::uint64_t>(calls_ / 2, files.calls());
    return *std::move(saved);
  }

  Random random_;
  const std::string directory_;
  ModelSource model_;
  CheckpointSaveOptions options_;
  Blocks before_;
  std::uint64_t calls_ = 0;  // of a save, about
  std::uint64_t killed_ = 0, new_ = 0, resumed_ = 0;
};

}  // namespace
}  // namespace paramwire

int main(int count, char** words) {
  std::uint64_t points = 200;
  std::uint64_t seed = 1;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word.rfind("--points=", 0) == 0) points = std::strtoull(word.c_str() + 9, nullptr, 10);
    if (word.rfind("--seed=", 0) == 0) seed = std::strtoull(word.c_str() + 7, nullptr, 10);
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::string directory = (std::filesystem::temp_directory_path() / "pw-kill-XXXXXX").string();
  if (::mkdtemp(directory.data()) == nullptr) paramwire::fail("mkdtemp");
  paramwire::Run run(seed, directory + "/weights");
  for (std::uint64_t point = 0; point < points; ++point) run.point(point);
  run.report(points);
  std::filesystem::remove_all(directory);
  return 0;
}
