// libcudart.so.13: devices, memory, streams, events and graphs. A kernel that is launched through it
// does nothing and is reported; ops.cpp computes what torch's own kernels would.
#include "lab.h"
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

using std::lock_guard;
using std::mutex;
using std::shared_ptr;

namespace {

// ---- state --------------------------------------------------------------------------------------

struct UserObject {  // what a graph keeps alive: `destroy` is called with the last reference
  void* object;
  cudaHostFn_t destroy;
  int references;
};
struct Graph {
  std::vector<lab::Action> actions;
  std::map<UserObject*, int> retained;  // with the number of references
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  pthread_t thread;
  std::set<cudaStream_t> streams;
  cudaStream_t origin;
  Graph graph;  // so far
  std::vector<std::pair<char*, std::string>> kept;  // memory and its contents before the capture
  bool invalid = false;
};
struct Stream {
  int device = 0, priority = 0;
  unsigned flags = 0;
  lab::Works works;
  shared_ptr<lab::Work> newest;  // of NCCL, also if it is done
  shared_ptr<Capture> capture;
};
struct Cell {  // of an event that two processes share; in a file of the process that created it
  std::atomic<uint64_t> recorded, done, wanted;  // numbers of records: made, reached, and waited for
  std::atomic<int> pid;                          // that has made the last record
};
struct Event {
  unsigned flags = 0;
  Cell* cell = nullptr;  // if it is shared
  int device = 0;
  bool recorded = false;
  int64_t recorded_ns = 0;
  lab::Works works;
  shared_ptr<lab::Work> newest;  // that of the stream
  cudaStream_t stream = nullptr;
  shared_ptr<Capture> capture;  // the capture in which it was recorded
};
struct Segment {
  size_t size;
};
struct Slot {  // memory use of a process, by physical device; in a file shared by all processes
  std::atomic<int> pid;
  std::atomic<size_t> used[64];
};
constexpr int SLOTS = 512;

mutex m;  // guards the state below
std::condition_variable finished;
std::map<cudaStream_t, Stream*> streams;                       // created by the program
std::map<std::pair<int, cudaStream_t>, Stream*> default_streams;  // by device and handle
std::set<shared_ptr<Capture>> captures;
std::map<int, std::map<size_t, Segment>> segments;  // device -> offset -> segment
std::map<const char*, size_t> host_memory;
char* arenas[64];
int arena_fds[64];
bool actives[64];
Slot* slots = nullptr;
Slot* mine = nullptr;
int mine_pid = 0;
unsigned long long capture_count = 0;
std::vector<std::pair<const void*, const char*>> kernels;
std::set<const char*> said;

thread_local int t_device = 0;
thread_local cudaError_t t_error = cudaSuccess;
thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) t_error = error;
  return error;
}

const char* variable(const char* name, const char* otherwise) {
  const char* text = getenv(name);
  return text && *text ? text : otherwise;
}

struct Visible {
  std::vector<int> physical;
  Visible() {
    int all = lab::all_devices();
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
      for (int i = 0; i < all; i++) physical.push_back(i);
      return;
    }
    std::string words = text;
    for (size_t at = 0; at <= words.size();) {
      size_t comma = std::min(words.find(',', at), words.size());
      std::string word = words.substr(at, comma - at);
      at = comma + 1;
      int number = -1;
      if (word.rfind("GPU-", 0) == 0) {
        for (int i = 0; i < all; i++) {
          char bytes[16], hex[40];
          lab::uuid(i, bytes);
          snprintf(hex, sizeof hex, "GPU-%02x%02x%02x%02x", (unsigned char)bytes[0], (unsigned char)bytes[1],
                   (unsigned char)bytes[2], (unsigned char)bytes[3]);
          if (std::string(hex).rfind(word.substr(0, 12), 0) == 0) number = i;
        }
      } else if (!word.empty() && strspn(word.c_str(), " 0123456789") == word.size()) {
        number = atoi(word.c_str());
      }
      if (number < 0 || number >= all) break;  // as in CUDA, which ignores the rest of the list
      physical.push_back(number);
    }
  }
};
const Visible& visible() {
  static Visible v;
  return v;
}

// The slot of this process. A forked process takes a new one.
Slot* own_slot() {
  if (!slots) {
    std::string path = variable("CUDALAB_STATE", ("/dev/shm/cudalab-" + std::to_string(getuid())).c_str());
    int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Slot) * SLOTS)) return nullptr;
    void* p = mmap(nullptr, sizeof(Slot) * SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return nullptr;
    slots = (Slot*)p;
  }
  if (mine && mine_pid == getpid()) return mine;
  for (int i = 0; i < SLOTS; i++) {
    int pid = slots[i].pid.load();
    if (pid && kill(pid, 0) == 0) continue;
    if (slots[i].pid.compare_exchange_strong(pid, getpid())) {
      for (auto& used : slots[i].used) used = 0;
      mine = &slots[i];
      mine_pid = getpid();
      atexit([] { if (mine && mine_pid == getpid()) mine->pid = 0; });
      return mine;
    }
  }
  return nullptr;
}

constexpr size_t CONTEXT = size_t(500) << 20;  // device memory that a context uses

void activate(int device) {  // create the primary context; requires m
  if (actives[device]) return;
  actives[device] = true;
  if (Slot* slot = own_slot()) slot->used[lab::physical(device)] += CONTEXT;
  if (!lab::verbose()) return;
  fprintf(stderr, "cudalab: pid %d has a context on device %d\n", getpid(), device);
  void* frames[24];
  if (*variable("CUDALAB_VERBOSE", "") == '2') backtrace_symbols_fd(frames, backtrace(frames, 24), 2);
}

char* arena(int device) {  // the address range of a device; requires m
  if (!arenas[device]) {
    int fd = memfd_create("cudalab", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, lab::ARENA)) return nullptr;
    void* p = mmap(nullptr, lab::ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED) { perror("cudalab: mmap"); return nullptr; }
    arenas[device] = (char*)p;
    arena_fds[device] = fcntl(fd, F_DUPFD_CLOEXEC, 500);  // above the descriptors that programs count on
    close(fd);
  }
  return arenas[device];
}

Stream* find(cudaStream_t s) {  // nullptr if the stream does not exist; requires m
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) {
    auto& stream = default_streams[{t_device, s == cudaStreamPerThread ? s : nullptr}];
    if (!stream) stream = new Stream{t_device};
    return stream;
  }
  auto it = streams.find(s);
  return it == streams.end() ? nullptr : it->second;
}

void drop_done(lab::Works& works) {
  works.erase(std::remove_if(works.begin(), works.end(), [](auto& w) { return w->done.load(); }), works.end());
}

// Called first by functions that a stream capture forbids, such as cudaMalloc, queries and waits. It
// invalidates the captures that they disturb. about_capture: whether the call refers to a capturing
// stream. The caller must hold m.
cudaError_t unsafe(bool about_capture = false) {
  if (lab::broken()) return cudaErrorAssert;
  for (auto& capture : captures) {
    bool ours = pthread_equal(capture->thread, pthread_self());
    bool forbidden = about_capture;
    if (t_mode != cudaStreamCaptureModeRelaxed) {
      if (capture->mode == cudaStreamCaptureModeGlobal && (ours || t_mode == cudaStreamCaptureModeGlobal)) forbidden = true;
      if (capture->mode == cudaStreamCaptureModeThreadLocal && ours) forbidden = true;
    }
    if (forbidden) {
      capture->invalid = true;
      fprintf(stderr, "cudalab: pid %d: a call that invalidates the stream capture\n", getpid());
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}

// ---- late kernels: a thread runs them, the last one launched first, unless a stream, an event or NCCL orders them.
// It waits until the host waits for their effects, or for LATEST_NS: while the host waits for something
// else, such as a message, a GPU computes, too.
struct Task {
  shared_ptr<lab::Work> work;
  std::function<void()> run;
  int device;
  int64_t launched_ns;
};
constexpr int64_t LATEST_NS = 200'000'000;
std::vector<Task> tasks;  // in the order of their launch
struct Shared {
  Cell* cell;
  uint64_t number;
  shared_ptr<lab::Work> work;
};
std::vector<Shared> shared;  // records of events that other processes may wait for
// Whether a record of a process, which also runs its kernels late, has been reached; otherwise it is wanted.
bool reached(Cell* cell, uint64_t number, int pid) {
  if (cell->done >= number) return true;
  if (cell->wanted < number) cell->wanted = number;
  static std::atomic<unsigned> polls{0};
  return ++polls % 1000 == 0 && kill(pid, 0);  // whether it has ended; asked seldom, because that is a system call
}

void want(const lab::Works& works) {  // the host waits for them; requires m
  lab::Works stack = works;
  while (!stack.empty()) {
    auto work = stack.back();
    stack.pop_back();
    if (work->done || work->wanted) continue;
    work->wanted = true;
    if (work->ready) work->ready();  // another process learns that it is wanted
    stack.insert(stack.end(), work->before.begin(), work->before.end());
  }
  finished.notify_all();
}
void run_late() {
  std::unique_lock<mutex> lock(m);
  for (;;) {
    int64_t now = lab::now_ns();
    std::erase_if(shared, [](Shared& record) {
      bool wanted = record.cell->wanted >= record.number;
      if (wanted) want({record.work});
      return wanted || record.work->done;
    });
    auto it = std::find_if(tasks.rbegin(), tasks.rend(), [&](Task& task) {
      drop_done(task.work->before);
      return task.work->before.empty() && (task.work->wanted || now > task.launched_ns + LATEST_NS) && (!task.work->ready || task.work->ready());
    });
    if (it == tasks.rend()) {
      bool depends = std::any_of(tasks.begin(), tasks.end(), [](Task& task) { return bool(task.work->ready); });
      finished.wait_for(lock, std::chrono::microseconds(depends ? 100 : tasks.empty() ? 1'000'000 : 2000));
      continue;
    }
    Task task = std::move(*it);
    tasks.erase(std::next(it).base());
    lock.unlock();
    t_device = task.device;
    try {
      task.run();
    } catch (const std::exception& error) {
      fprintf(stderr, "cudalab: pid %d: a kernel failed: %s\n", getpid(), error.what());
      lab::break_device();
    }
    task.run = nullptr;
    lab::finish(task.work);
    lock.lock();
  }
}

cudaError_t allocate(void** out, size_t bytes, int device) {
  lock_guard<mutex> lock(m);
  if (cudaError_t error = unsafe()) return fail(error);
  if (device >= lab::count()) return fail(cudaErrorNoDevice);
  activate(device);
  *out = nullptr;
  if (!bytes) return cudaSuccess;
  size_t unit = bytes < (size_t(1) << 20) ? 512 : size_t(2) << 20;
  size_t size = (bytes + unit - 1) / unit * unit;
  int number = lab::physical(device);
  if (lab::used_bytes(number) + size > lab::memory_bytes()) return fail(cudaErrorMemoryAllocation);
  char* base = arena(device);
  if (!base) return fail(cudaErrorMemoryAllocation);
  auto& of_device = segments[device];
  size_t at = size_t(2) << 20;
  for (auto& [offset, segment] : of_device) {
    size_t aligned = (at + unit - 1) / unit * unit;
    if (aligned + size <= offset) break;
    at = offset + segment.size;
  }
  at = (at + unit - 1) / unit * unit;
  of_device[at] = {size};
  if (Slot* slot = own_slot()) slot->used[number] += size;
  *out = base + at;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  if (lab::late()) lab::sync_all();
  lab::Place p;
  if (!lab::place(pointer, &p)) return fail(cudaErrorInvalidValue);
  lock_guard<mutex> lock(m);
  if (cudaError_t error = unsafe()) return fail(error);
  auto& of_device = segments[p.device];
  auto it = of_device.find(p.offset);
  if (it == of_device.end()) return fail(cudaErrorInvalidValue);
  size_t page = 4096, begin = (p.offset + page - 1) / page * page, end = (p.offset + it->second.size) / page * page;
  if (end > begin) fallocate(p.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, end - begin);
  if (Slot* slot = own_slot()) slot->used[lab::physical(p.device)] -= it->second.size;
  of_device.erase(it);
  return cudaSuccess;
}

}  // namespace

// ---- functions for the other libraries -----------------------------------------------------------------

namespace lab {

static std::atomic<bool> is_broken{false};
void break_device() { is_broken = true; }
bool broken() { return is_broken; }

std::atomic<Listener> listener{nullptr};
std::atomic<uint64_t (*)()> profiler_clock{nullptr};
int64_t stamp() {
  auto clock = profiler_clock.load();
  return clock ? clock() : now_ns();
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
bool late() {
  static bool v = *variable("CUDALAB_LATE", "0") != '0';
  return v;
}
bool verbose() {
  static bool v = *variable("CUDALAB_VERBOSE", "0") != '0';
  return v;
}
int all_devices() {
  static int n = std::min(64, atoi(variable("CUDALAB_DEVICES", "8")));
  return n;
}
int count() { return visible().physical.size(); }
int current() { return t_device; }
int physical(int device) { return visible().physical.at(device); }
size_t memory_bytes() {
  static size_t bytes = atof(variable("CUDALAB_MEMORY_GIB", "79.11")) * (1 << 30);
  return bytes;
}
const char* device_name() { return variable("CUDALAB_NAME", "cudalab (no GPU)"); }
void uuid(int number, char bytes[16]) {
  for (int i = 0; i < 16; i++) bytes[i] = (char)(0x11 * (number + 1) + 7 * i);
}
bool active(int device) { lock_guard<mutex> lock(m); return actives[device]; }
void touch(int device) { lock_guard<mutex> lock(m); activate(device); }

size_t used_bytes(int number) {
  if (!own_slot()) return 0;
  size_t sum = 0;
  for (int i = 0; i < SLOTS; i++) {
    int pid = slots[i].pid.load();
    if (pid && (pid == getpid() || kill(pid, 0) == 0)) sum += slots[i].used[number];
  }
  return sum;
}

bool place(const void* pointer, Place* out) {
  for (int d = 0; d < 64; d++) {
    char* base = arenas[d];
    if (base && pointer >= base && pointer < base + ARENA) {
      *out = {d, arena_fds[d], size_t((const char*)pointer - base)};
      return true;
    }
  }
  return false;
}

Works tail(cudaStream_t s) {
  lock_guard<mutex> lock(m);
  Stream* stream = find(s);
  if (!stream) return {};
  drop_done(stream->works);
  return stream->works;
}
void push(cudaStream_t s, shared_ptr<Work> work) {
  lock_guard<mutex> lock(m);
  if (Stream* stream = find(s)) {
    stream->works = {work};
    stream->newest = work;
  }
}
void finish(const shared_ptr<Work>& work) {
  work->finished_ns = now_ns();
  lock_guard<mutex> lock(m);
  work->done = true;
  work->before.clear();
  finished.notify_all();
}
bool wait(const Works& works, const std::atomic<bool>* stop) {
  std::unique_lock<mutex> lock(m);
  if (late() && !stop) want(works);
  for (auto& work : works) {
    while (!work->done) {
      if (stop && stop->load()) return false;
      finished.wait_for(lock, std::chrono::milliseconds(stop ? 20 : 1000));
    }
  }
  return true;
}
void sync(cudaStream_t s) { wait(tail(s)); }
void sync_all() {
  Works works;
  {
    lock_guard<mutex> lock(m);
    for (auto& [_, s] : streams) works.insert(works.end(), s->works.begin(), s->works.end());
    for (auto& [_, s] : default_streams) works.insert(works.end(), s->works.begin(), s->works.end());
  }
  wait(works);
}
static shared_ptr<Work> add_task(cudaStream_t s, std::function<void()> kernel, std::function<bool()> ready = nullptr) {  // requires m
  Stream* stream = find(s);
  drop_done(stream->works);
  auto work = std::make_shared<Work>();
  work->before = stream->works;
  stream->works = {work};
  work->ready = std::move(ready);
  tasks.push_back({work, std::move(kernel), t_device, now_ns()});
  static int running_in = 0;
  if (running_in != getpid()) std::thread(run_late).detach();
  running_in = getpid();
  return work;
}
void launch(cudaStream_t s, std::function<void()> kernel) {
  if (!late()) {
    sync(s);
    return kernel();
  }
  lock_guard<mutex> lock(m);
  add_task(s, std::move(kernel));
}

bool capturing(cudaStream_t s) {
  lock_guard<mutex> lock(m);
  Stream* stream = find(s);
  return stream && stream->capture;
}
void record(cudaStream_t s, Action action) {
  lock_guard<mutex> lock(m);
  Stream* stream = find(s);
  if (stream && stream->capture) stream->capture->graph.actions.push_back(std::move(action));
}
void keep(cudaStream_t s, void* memory, size_t bytes) {
  lock_guard<mutex> lock(m);
  Stream* stream = find(s);
  if (stream && stream->capture) stream->capture->kept.emplace_back((char*)memory, std::string((char*)memory, bytes));
}
void tell(Kind kind, const char* name, cudaStream_t stream, int64_t begin_ns, size_t bytes) {
  if (Listener l = listener.load()) l(kind, name, t_device, stream, begin_ns, stamp(), bytes);
}

int attribute(int number, int device) {
  switch (number) {
    case 1: return 1024;       // threads of a block
    case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return 49152;      // shared memory of a block
    case 9: return 65536;
    case 10: return 32;
    case 12: case 82: return 65536;
    case 13: return 1980000;   // kHz
    case 16: return 132;
    case 19: case 31: case 41: case 90: case 95: case 96: case 102: case 103: case 115: case 120: case 125: return 1;
    case 32: return 1;         // ECC
    case 33: return 0x10 + physical(device);
    case 34: case 50: return 0;
    case 36: return 2619000;   // kHz
    case 37: return 5120;      // bits
    case 38: return 50 << 20;
    case 39: return 2048;
    case 40: return 3;
    case 75: return 9;
    case 76: return 0;
    case 78: return 1;
    case 81: return 233472;
    case 97: return 232448;
    case 106: return 32;
    case 111: return 1024;
    case 116: return 1;
    default: return 0;
  }
}
}  // namespace lab

// ---- the interface --------------------------------------------------------------------------------

using namespace lab;
#define API extern "C" __attribute__((visibility("default"))) cudaError_t
#define TOUCH lab::touch(t_device)

API cudaGetDeviceCount(int* n) { *n = count(); return *n ? cudaSuccess : fail(cudaErrorNoDevice); }
API cudaGetDevice(int* d) { *d = t_device; return count() ? cudaSuccess : fail(cudaErrorNoDevice); }
API cudaSetDevice(int d) {
  if (d < 0 || d >= count()) return fail(cudaErrorInvalidDevice);
  t_device = d;
  TOUCH;
  return cudaSuccess;
}
extern "C" long lab_missing(const char* name) {  // a stub calls it, see build.sh
  fprintf(stderr, "cudalab: pid %d called %s, which is not implemented: add it to src/, or to src/no_effect.txt with a reason\n", getpid(), name);
  abort();
}
extern "C" void lab_use_device(int d) { t_device = d; }  // as cuCtxSetCurrent: creates no context
API cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  if (d < 0 || d >= count()) return fail(cudaErrorInvalidDevice);
  *v = attribute(a, d);
  return cudaSuccess;
}
API cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d < 0 || d >= count()) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", device_name());
  lab::uuid(physical(d), p->uuid.bytes);
  p->totalGlobalMem = memory_bytes();
  p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536; p->major = 9; p->minor = 0; p->textureAlignment = 512;
  p->multiProcessorCount = 132; p->canMapHostMemory = 1; p->concurrentKernels = 1; p->ECCEnabled = 1;
  p->pciBusID = 0x10 + physical(d); p->asyncEngineCount = 3; p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120; p->l2CacheSize = 50 << 20; p->persistingL2CacheMaxSize = 32 << 20;
  p->maxThreadsPerMultiProcessor = 2048; p->streamPrioritiesSupported = 1; p->globalL1CacheSupported = 1;
  p->localL1CacheSupported = 1; p->sharedMemPerMultiprocessor = 233472; p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1; p->cooperativeLaunch = 1; p->sharedMemPerBlockOptin = 232448;
  p->maxBlocksPerMultiProcessor = 32; p->reservedSharedMemPerBlock = 1024; p->hostRegisterSupported = 1;
  p->memoryPoolsSupported = 1; p->gpuDirectRDMASupported = 1; p->ipcEventSupported = 1; p->clusterLaunch = 1;
  p->hostNumaId = -1;
  return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* text, int length, int d) {
  if (d < 0 || d >= count()) return fail(cudaErrorInvalidDevice);
  snprintf(text, length, "0000:%02X:00.0", 0x10 + physical(d));
  return cudaSuccess;
}
API cudaDeviceCanAccessPeer(int* can, int a, int b) { *can = a != b; return cudaSuccess; }
API cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaGetLastError() { cudaError_t e = t_error; t_error = cudaSuccess; return e; }
API cudaPeekAtLastError() { return t_error; }
API cudaProfilerStart() { return cudaSuccess; }
API cudaProfilerStop() { return cudaSuccess; }

extern "C" const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorOfTheLab";
  }
}
extern "C" const char* cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "an error of the lab";
  }
}

// -- memory
API cudaMalloc(void** p, size_t n) { return allocate(p, n, t_device); }
API cudaMallocAsync(void** p, size_t n, cudaStream_t) { return allocate(p, n, t_device); }
API cudaFree(void* p) { TOUCH; return release(p); }
API cudaFreeAsync(void* p, cudaStream_t s) { sync(s); return release(p); }
API cudaMemGetInfo(size_t* free, size_t* total) {
  TOUCH;
  *total = memory_bytes();
  size_t used = used_bytes(physical(t_device));
  *free = *total > used ? *total - used : 0;
  return cudaSuccess;
}
API cudaHostAlloc(void** p, size_t n, unsigned) {
  TOUCH;
  if (posix_memalign(p, 4096, n ? n : 1)) return fail(cudaErrorMemoryAllocation);
  lock_guard<mutex> lock(m);
  host_memory[(char*)*p] = n;
  return cudaSuccess;
}
API cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
API cudaFreeHost(void* p) {
  if (late()) sync_all();
  lock_guard<mutex> lock(m);
  if (p && !host_memory.erase((char*)p)) return fail(cudaErrorInvalidValue);
  free(p);
  return cudaSuccess;
}
API cudaHostRegister(void* p, size_t n, unsigned) {
  lock_guard<mutex> lock(m);
  if (host_memory.count((char*)p)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  host_memory[(char*)p] = n;
  return cudaSuccess;
}
API cudaHostUnregister(void* p) {
  lock_guard<mutex> lock(m);
  return host_memory.erase((char*)p) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
API cudaHostGetDevicePointer(void** d, void* h, unsigned) { *d = h; return cudaSuccess; }
API cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  Place found;
  if (place(p, &found)) {
    a->type = cudaMemoryTypeDevice;
    a->device = found.device;
    a->devicePointer = (void*)p;
    return cudaSuccess;
  }
  lock_guard<mutex> lock(m);
  auto it = host_memory.upper_bound((const char*)p);
  bool pinned = it != host_memory.begin() && (--it, (const char*)p < it->first + it->second);
  a->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = pinned ? t_device : -2;
  a->hostPointer = (void*)p;
  return cudaSuccess;
}
struct IpcHandle { int pid, fd; size_t offset; };
static std::map<std::pair<int, int>, char*> mapped;
static bool of_another_process(const void* p) {
  lock_guard<mutex> lock(m);
  return std::any_of(mapped.begin(), mapped.end(), [&](auto& item) { return p >= item.second && p < item.second + ARENA; });
}
static cudaError_t copy(void* to, const void* from, size_t n, cudaStream_t s, bool waits) {
  TOUCH;
  if (broken()) return fail(cudaErrorAssert);
  if (capturing(s)) {
    record(s, [=](cudaStream_t at) { lab::sync(at); memmove(to, from, n); });
    return cudaSuccess;
  }
  if (waits) {
    lock_guard<mutex> lock(m);
    if (cudaError_t error = unsafe()) return fail(error);
  }
  auto move = [=] {
    int64_t begin = listener.load() ? stamp() : 0;
    memmove(to, from, n);
    if (begin) tell(COPY, "", s, begin, n);
  };
  auto pageable = [](const void* p) {
    cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, p);
    return found.type == cudaMemoryTypeUnregistered && !of_another_process(p);
  };
  launch(s, move);
  if (waits || pageable(to) || pageable(from)) sync(s);
  return cudaSuccess;
}
API cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { return copy(to, from, n, 0, true); }
API cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) { return copy(to, from, n, s, false); }
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) { return copy(to, from, n, s, false); }
API cudaMemcpy2DAsync(void* to, size_t tp, const void* from, size_t fp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t s) {
  for (size_t i = 0; i < h; i++) copy((char*)to + i * tp, (const char*)from + i * fp, w, s, false);
  return cudaSuccess;
}
API cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) {
  TOUCH;
  if (capturing(s)) { record(s, [=](cudaStream_t at) { lab::sync(at); memset(p, v, n); }); return cudaSuccess; }
  launch(s, [=] {
    int64_t begin = listener.load() ? stamp() : 0;
    memset(p, v, n);
    if (begin) tell(SET, "", s, begin, n);
  });
  return cudaSuccess;
}
API cudaMemset(void* p, int v, size_t n) { return cudaMemsetAsync(p, v, n, 0); }

API cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) {
  Place found;
  if (!place(p, &found)) return fail(cudaErrorInvalidValue);
  memset(h, 0, sizeof *h);
  *(IpcHandle*)h = {getpid(), found.fd, found.offset};
  return cudaSuccess;
}
extern "C" char* lab_map(int pid, int fd) {  // map the device memory of another process
  lock_guard<mutex> lock(m);
  auto& base = mapped[{pid, fd}];
  if (!base) {
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void* p = file < 0 ? MAP_FAILED : mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (file >= 0) close(file);
    if (p == MAP_FAILED) { perror(("cudalab: " + path).c_str()); return nullptr; }
    base = (char*)p;
  }
  return base;
}
API cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned) {
  TOUCH;
  IpcHandle* handle = (IpcHandle*)&h;
  if (handle->pid == getpid()) return fail(cudaErrorInvalidDevice);  // CUDA refuses handles of the same process
  char* base = lab_map(handle->pid, handle->fd);
  if (!base) return fail(cudaErrorMapBufferObjectFailed);
  *p = base + handle->offset;
  static std::atomic<bool> told{false};
  if (verbose() && !told.exchange(true)) fprintf(stderr, "cudalab: pid %d: maps device memory of pid %d\n", getpid(), handle->pid);
  return cudaSuccess;
}
API cudaIpcCloseMemHandle(void*) { return cudaSuccess; }

static Cell* cells = nullptr;
static int cells_fd = -1;
constexpr size_t CELLS = size_t(1) << 20;  // used in turn: by then nothing waits for the old event
static Cell* new_cell() {
  static std::atomic<size_t> made{0};
  lock_guard<mutex> lock(m);
  if (!cells) {
    int fd = memfd_create("cudalab events", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, CELLS * sizeof(Cell))) return nullptr;
    cells = (Cell*)mmap(nullptr, CELLS * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    cells_fd = fcntl(fd, F_DUPFD_CLOEXEC, 500);
    close(fd);
  }
  Cell* cell = cells + made++ % CELLS;
  cell->recorded = cell->done = cell->wanted = cell->pid = 0;
  return cell;
}
API cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t e) {
  Event* event = (Event*)e;
  if (!event->cell || event->cell < cells || event->cell >= cells + CELLS) return fail(cudaErrorInvalidResourceHandle);
  memset(h, 0, sizeof *h);
  *(IpcHandle*)h = {getpid(), cells_fd, size_t((char*)event->cell - (char*)cells)};
  return cudaSuccess;
}

// -- streams
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
  TOUCH;
  lock_guard<mutex> lock(m);
  Stream* stream = new Stream{t_device, std::min(0, std::max(-5, priority)), flags};
  *s = (cudaStream_t)stream;
  streams[*s] = stream;
  return cudaSuccess;
}
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaStreamDestroy(cudaStream_t s) {
  lock_guard<mutex> lock(m);
  if (!streams.erase(s)) return fail(cudaErrorInvalidResourceHandle);
  delete (Stream*)s;
  return cudaSuccess;
}
#define STREAM(s) Stream* stream = find(s); if (!stream) return fail(cudaErrorInvalidResourceHandle)
API cudaStreamGetPriority(cudaStream_t s, int* priority) { lock_guard<mutex> lock(m); STREAM(s); *priority = stream->priority; return cudaSuccess; }
API cudaStreamQuery(cudaStream_t s) {
  lock_guard<mutex> lock(m);
  STREAM(s);
  if (cudaError_t error = unsafe(bool(stream->capture))) return fail(error);
  drop_done(stream->works);
  return stream->works.empty() ? cudaSuccess : cudaErrorNotReady;
}
API cudaStreamSynchronize(cudaStream_t s) {
  Works works;
  {
    lock_guard<mutex> lock(m);
    STREAM(s);
    if (cudaError_t error = unsafe(bool(stream->capture))) return fail(error);
    works = stream->works;
  }
  wait(works);
  return cudaSuccess;
}
API cudaDeviceSynchronize() {
  TOUCH;
  Works works;
  {
    lock_guard<mutex> lock(m);
    if (cudaError_t error = unsafe()) return fail(error);
    auto add = [&](Stream* s) { if (s->device == t_device) works.insert(works.end(), s->works.begin(), s->works.end()); };
    for (auto& [_, s] : streams) add(s);
    for (auto& [_, s] : default_streams) add(s);
  }
  wait(works);
  return cudaSuccess;
}
API cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  lock_guard<mutex> lock(m);
  STREAM(s);
  Event* event = (Event*)e;
  if (Cell* cell = event->cell; cell && late() && cell->pid && cell->pid != getpid()) {
    uint64_t number = cell->recorded;
    int pid = cell->pid;
    add_task(s, [] {}, [=] { return reached(cell, number, pid); });
    return cudaSuccess;
  }
  if (event->capture && !event->capture->streams.empty()) {
    if (!stream->capture) { stream->capture = event->capture; event->capture->streams.insert(s); }
  } else if (stream->capture) {
    if (!event->works.empty()) drop_done(event->works);
    if (event->recorded) {  // a captured stream must not wait for an event from outside the capture
      stream->capture->invalid = true;
      return fail(cudaErrorStreamCaptureIsolation);
    }
  } else {
    drop_done(stream->works);
    stream->works.insert(stream->works.end(), event->works.begin(), event->works.end());
    if (event->newest && event->newest->waits && event->stream != s) {
      ++*event->newest->waits;
      event->newest->waits = nullptr;
    }
  }
  return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) {
  if (capturing(s)) { record(s, [=](cudaStream_t at) { lab::sync(at); f(data); }); return cudaSuccess; }
  sync(s);
  f(data);
  return cudaSuccess;
}
API cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) { sync(s); f(s, cudaSuccess, data); return cudaSuccess; }

// -- events
API cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  TOUCH;
  Event* event = new Event;
  event->flags = flags;
  event->device = t_device;
  if (flags & cudaEventInterprocess) event->cell = new_cell();
  *e = (cudaEvent_t)event;
  return cudaSuccess;
}
API cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaEventDestroy(cudaEvent_t e) { delete (Event*)e; return cudaSuccess; }
API cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  Event* event = (Event*)e;
  if (event->cell && !late()) sync(s);
  if (broken()) return fail(cudaErrorAssert);
  bool captures = capturing(s);
  lock_guard<mutex> lock(m);
  STREAM(s);
  if (late() && !captures) {  // an event is as late as a kernel
    if (Cell* cell = event->cell) {
      uint64_t number = ++cell->recorded;
      int before = cell->pid.exchange(getpid());
      auto work = add_task(s, [=] { cell->done = number; }, [=] { return reached(cell, number - 1, before); });
      shared.push_back({cell, number, work});
    } else {
      add_task(s, [] {});
    }
  }
  if (event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
  activate(stream->device);
  drop_done(stream->works);
  event->recorded = true;
  event->recorded_ns = now_ns();
  event->works = stream->works;
  event->newest = stream->newest;
  event->stream = s;
  event->capture = stream->capture;
  return cudaSuccess;
}
API cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t h) {
  IpcHandle* handle = (IpcHandle*)&h;
  char* base = lab_map(handle->pid, handle->fd);
  if (!base) return fail(cudaErrorMapBufferObjectFailed);
  Event* event = new Event{.flags = cudaEventDisableTiming, .cell = (Cell*)(base + handle->offset)};
  event->device = t_device;
  *e = (cudaEvent_t)event;
  return cudaSuccess;
}
static bool complete(Event* event) {
  return std::all_of(event->works.begin(), event->works.end(), [](auto& w) { return w->done.load(); });
}
API cudaEventQuery(cudaEvent_t e) {
  lock_guard<mutex> lock(m);
  Event* event = (Event*)e;
  if (cudaError_t error = unsafe(event->capture && !event->capture->streams.empty())) return fail(error);
  return complete(event) ? cudaSuccess : cudaErrorNotReady;
}
API cudaEventSynchronize(cudaEvent_t e) {
  Works works;
  {
    lock_guard<mutex> lock(m);
    Event* event = (Event*)e;
    if (cudaError_t error = unsafe(event->capture && !event->capture->streams.empty())) return fail(error);
    works = event->works;
  }
  wait(works);
  return cudaSuccess;
}
static int64_t time_of(Event* event) {
  int64_t t = event->recorded_ns;
  for (auto& work : event->works) t = std::max(t, work->finished_ns);
  return t;
}
API cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  lock_guard<mutex> lock(m);
  Event *begin = (Event*)a, *end = (Event*)b;
  if (!begin->recorded || !end->recorded || begin->device != end->device) return fail(cudaErrorInvalidResourceHandle);
  if ((begin->flags | end->flags) & cudaEventDisableTiming) return fail(cudaErrorInvalidResourceHandle);
  if (!complete(begin) || !complete(end)) return cudaErrorNotReady;
  *ms = (time_of(end) - time_of(begin)) / 1e6f;
  return cudaSuccess;
}

// -- graphs
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { std::swap(t_mode, *mode); return cudaSuccess; }
API cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  lock_guard<mutex> lock(m);
  STREAM(s);
  if (stream->capture) return fail(cudaErrorIllegalState);
  if (s == nullptr || s == cudaStreamLegacy) return fail(cudaErrorStreamCaptureUnsupported);
  auto capture = std::make_shared<Capture>();
  capture->id = ++capture_count; capture->mode = mode; capture->thread = pthread_self();
  capture->streams = {s}; capture->origin = s;
  stream->capture = capture;
  captures.insert(capture);
  return cudaSuccess;
}
static void refer(UserObject* object, int more) {
  if ((object->references += more) > 0) return;
  object->destroy(object->object);
  delete object;
}
API cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  lock_guard<mutex> lock(m);
  STREAM(s);
  auto capture = stream->capture;
  if (!capture) return fail(cudaErrorIllegalState);
  for (cudaStream_t each : capture->streams) if (Stream* other = find(each)) other->capture = nullptr;
  capture->streams.clear();
  captures.erase(capture);
  for (auto it = capture->kept.rbegin(); it != capture->kept.rend(); ++it) memcpy(it->first, it->second.data(), it->second.size());
  *graph = nullptr;
  if (capture->invalid) {
    for (auto& [object, n] : capture->graph.retained) refer(object, -n);
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  *graph = (cudaGraph_t) new Graph(std::move(capture->graph));
  return cudaSuccess;
}
API cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  lock_guard<mutex> lock(m);
  STREAM(s);
  *status = !stream->capture ? cudaStreamCaptureStatusNone : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                             const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  cudaError_t error = cudaStreamIsCapturing(s, status);
  if (error) return error;
  lock_guard<mutex> lock(m);
  STREAM(s);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  if (graph) *graph = stream->capture ? (cudaGraph_t)&stream->capture->graph : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) { return cudaSuccess; }
API cudaUserObjectCreate(cudaUserObject_t* out, void* object, cudaHostFn_t destroy, unsigned references, unsigned) { *out = (cudaUserObject_t) new UserObject{object, destroy, (int)references}; return cudaSuccess; }
API cudaUserObjectRetain(cudaUserObject_t object, unsigned n) { refer((UserObject*)object, n); return cudaSuccess; }
API cudaUserObjectRelease(cudaUserObject_t object, unsigned n) { refer((UserObject*)object, -(int)n); return cudaSuccess; }
API cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned n, unsigned flags) {
  if (!(flags & cudaGraphUserObjectMove)) refer((UserObject*)object, n);
  ((Graph*)graph)->retained[(UserObject*)object] += n;
  return cudaSuccess;
}
static void destroy(Graph* graph) {
  for (auto& [object, n] : graph->retained) refer(object, -n);
  delete graph;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  auto made = new Graph(*(Graph*)graph);
  for (auto& [object, n] : made->retained) refer(object, n);
  *exec = (cudaGraphExec_t)made;
  return cudaSuccess;
}
API cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) { return cudaGraphInstantiateWithFlags(exec, graph, flags); }
API cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  TOUCH;
  for (auto& action : ((Graph*)exec)->actions) action(s);
  return cudaSuccess;
}
API cudaGraphDestroy(cudaGraph_t graph) { destroy((Graph*)graph); return cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t exec) { destroy((Graph*)exec); return cudaSuccess; }
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) { *n = ((Graph*)graph)->actions.size(); return cudaSuccess; }
API cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) { *n = 0; return cudaSuccess; }

// -- kernels
static const char* kernel_name(const void* function) {
  for (auto& [f, name] : kernels) if (f == function) return name;
  return "?";
}
static cudaError_t launch(const void* function) {
  TOUCH;
  if (broken()) return fail(cudaErrorAssert);
  lock_guard<mutex> lock(m);
  const char* name = kernel_name(function);
  if (said.insert(name).second) fprintf(stderr, "cudalab: pid %d: this kernel does nothing: %.200s\n", getpid(), name);
  return cudaSuccess;
}
struct Configuration { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local Configuration t_configuration;
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) { t_configuration = {grid, block, shared, stream}; return 0; }
extern "C" cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = t_configuration.grid; *block = t_configuration.block; *shared = t_configuration.shared;
  *(cudaStream_t*)stream = t_configuration.stream;
  return cudaSuccess;
}
API cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) { return launch(f); }
extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3, dim3, void**, size_t, cudaStream_t) { return launch(f); }
API cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) { return launch(f); }
API cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* f, void**) { return launch(f); }
extern "C" void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
extern "C" char __cudaInitModule(void**) { return 1; }
extern "C" cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
extern "C" void __cudaRegisterFunction(void**, const char* f, char*, const char* name, int, void*, void*, void*, void*, int*) { kernels.emplace_back(f, name); }
extern "C" void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->binaryVersion = 90; a->ptxVersion = 90; a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return cudaSuccess; }
API cudaGetSymbolAddress(void** p, const void*) { static char space[1 << 20]; *p = space; return cudaSuccess; }
API cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { static char p; *pool = (cudaMemPool_t)&p; return cudaSuccess; }
API cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) { *(uint64_t*)v = 0; return cudaSuccess; }
API cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* v) { *(uint64_t*)v = 0; return cudaSuccess; }

API cudaGetDriverEntryPointByVersion(const char* symbol, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  std::string name = symbol;
  *f = nullptr;
  for (const char* suffix : {"", "_v2", "_v3"}) if (!*f && driver) *f = dlsym(driver, (name + suffix).c_str());
  if (status) *status = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*f && verbose()) fprintf(stderr, "cudalab: no %s in the driver\n", symbol);
  return cudaSuccess;
}
API cudaGetDriverEntryPoint(const char* symbol, void** f, unsigned long long flags, cudaDriverEntryPointQueryResult* status) { return cudaGetDriverEntryPointByVersion(symbol, f, 13000, flags, status); }
