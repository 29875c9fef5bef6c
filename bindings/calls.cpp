#include "calls.hpp"
#include "convert.hpp"

#include "paramwire/base/text.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <exception>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace paramwire::bindings {

class Job {
 public:
  explicit Job(std::function<void()> work) : work_(std::move(work)) {}

  void run() {
    try {
      work_();
    } catch (...) {
      failure_ = std::current_exception();  // no memory; the core throws nothing else
    }
    work_ = nullptr;  // what it owned goes in this thread, before anybody is told
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  bool done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void rethrow() {
    if (failure_) std::rethrow_exception(failure_);
  }
  bool wait(std::chrono::milliseconds span) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, span, [this] { return done_; });
  }

 private:
  std::function<void()> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr failure_;  // read after done
};

namespace {

// Between two looks at the signals: half of the 200 ms that a Ctrl-C may take, and 20 wake-ups a second cost nothing.
constexpr std::chrono::milliseconds kLook{50};

// Threads that run jobs and wait for the next one. Detached and never destroyed: they may outlive the interpreter, and end
// with the process. In the child of a fork they are not there: the child gets a pool of its own.
class Workers {
 public:
  Workers() : pid_(::getpid()) {}
  pid_t pid() const noexcept { return pid_; }

  void add(std::shared_ptr<Job> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (jobs_.size() > idle_) spawn();
    changed_.notify_one();
  }

 private:
  void spawn() {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to Python's threads
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::system_error& refused) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      if (threads_ == 0) {
        jobs_.pop_back();
        raise(Error(Code::kUnavailable, cat("no thread to wait for this call in: ", std::string_view(refused.what()))));
      }
      return;  // another worker takes it when it is free
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ++threads_;
  }
  void run() {
    pthread_setname_np(pthread_self(), "pw-call");
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      --idle_;
      const auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job->run();
      lock.lock();
    }
  }

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::size_t idle_ = 0;
  std::size_t threads_ = 0;
};

std::atomic<unsigned> forks{0};  // that made this process, from its first call of in_main_thread() on

// Under the GIL, which is their lock.
Workers* workers = nullptr;
std::vector<std::pair<std::function<bool()>, PyObject*>>* kept = nullptr;

}  // namespace

// Asked for every call, and two system calls are a tenth of a small one: known until the next fork, whose child may have another.
bool in_main_thread() noexcept {
  [[maybe_unused]] static const int watched = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  struct Known {
    unsigned forks = 0;
    bool asked = false, main = false;
  };
  static thread_local Known known;
  const unsigned now = forks.load(std::memory_order_relaxed);
  if (!known.asked || known.forks != now) known = {now, true, ::gettid() == ::getpid()};
  return known.main;
}

bool signal_raised() {
  const unsigned before = forks.load(std::memory_order_relaxed);
  const GilTaken taken;
  // A handler may have forked, and this be its child: the parent waits for that answer, nobody here may read it.
  return PyErr_CheckSignals() != 0 || forks.load(std::memory_order_relaxed) != before;
}

std::shared_ptr<Job> start_job(std::function<void()> work) {
  drop_finished();
  if (workers == nullptr || workers->pid() != ::getpid()) workers = new Workers();
  auto job = std::make_shared<Job>(std::move(work));
  workers->add(job);
  return job;
}

void await_job(const std::shared_ptr<Job>& job, py::object keep) {
  while (!without_gil([&] { return job->wait(kLook); })) {
    if (PyErr_CheckSignals() == 0) continue;
    keep_until([job] { return job->done(); }, std::move(keep));
    throw py::error_already_set();
  }
  job->rethrow();
}

void keep_until(std::function<bool()> done, py::object keep) {
  if (kept == nullptr) kept = new std::vector<std::pair<std::function<bool()>, PyObject*>>();
  kept->emplace_back(std::move(done), keep.release().ptr());
}

void drop_finished() {
  if (kept == nullptr || kept->empty()) return;
  std::vector<PyObject*> finished;
  std::erase_if(*kept, [&](const auto& entry) {
    if (!entry.first()) return false;
    finished.push_back(entry.second);
    return true;
  });
  for (PyObject* object : finished) Py_DECREF(object);  // may run any code: the list is whole again
}

}  // namespace paramwire::bindings
