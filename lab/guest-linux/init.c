/*
 * The first process of the Linux guest in tests, the demo and the benchmark. It is built against
 * the kernel's nolibc, so it needs no C library. The kernel's command line chooses the work:
 *
 *   pf=check     does things whose results are always the same, and shuts down
 *   pf=measure   times what an operating system does often, and shuts down
 *   pf=busy      repeats mixed work for ever: processes, pipes, new pages, arithmetic
 *   pf=load      writes and checks memory and files for ever, beside a timer loop
 *   pf=storm     forks, executes, maps, protects and writes code on all processors
 *   pf=torture   runs the kernel's own torture tests, rcutorture and locktorture
 *   pf=reads     reads blocks of /dev/vda in no order by 32 processes, past the page cache
 *
 * pf_seconds=N is how long storm, reads, and each test of torture, runs. pf_mib=N is the memory of load.
 * pf_timer_ms=N is the period of load's timer (1).
 * pf_rest_ms=N lets load rest so long now and then, which leaves the processor to others (0).
 * pf_disk=1 lets load keep a tree of files on the ext4 of /dev/vda, too. pf_net=PORT lets it talk to
 * an echo server at this port of 10.77.0.1, as 10.77.0.2.
 *
 * It loads the modules that /modules/list names, in that order. A distribution's kernel needs them.
 *
 * Every line begins with "PF" and is one write. FAIL says that something was wrong.
 *
 *   PF up <ns>                      first of all: the monotonic clock
 *   PF modules <n>                  the number of modules that it has loaded, if any are listed
 *   PF check <name> <hex>           check: a result
 *   PF fork|exec|pipe|touch <ns>    measure: one fork with exit and wait, the same with an exec, a
 *                                   round trip of a byte through two pipes, a new page
 *   PF loop <ns> <hex>              measure: LOOP_ROUNDS rounds of loop(), and their result
 *   PF busy <ns> <rounds>           busy: the clock, and rounds so far
 *   PF tick <ns> <gap>              load: the clock, and the largest gap in ns between two rounds
 *                                   of its timer since the line before
 *   PF load <pages> <wrong>         load: pages checked so far, and pages with wrong contents
 *   PF md5 <rounds> <wrong>         load: MD5 sums of a tree of files so far, and wrong ones
 *   PF disk <rounds> <wrong>        load: the same of the tree on disk, each file synchronised
 *   PF net <blocks> <wrong>         load: blocks of 1 KiB that came back so far, and wrong ones
 *   PF storm <what> <rounds>        storm: rounds of each kind
 *   PF torture <test> <hex>         torture: 1 if the test succeeded
 *   PF exit <ns>                    reads, on x86-64: an instruction that leaves the guest
 *   PF reads <ns> <blocks>          reads: the time, and the blocks of 4 KiB read in it
 *   PF done                         last of all, before it shuts down
 */
#define MIB (1024UL * 1024)
#define PAGE 4096UL
#define LOOP_ROUNDS 20000000UL
#define EXITS 5000UL

typedef unsigned long u64;
typedef unsigned int u32;

/* Written by several processes and threads. */
struct shared {
	u64 stop, wrong, execs, maps, codes, reads;
};
static struct shared *shared;

/* ---- Output ---- */

static char *put_text(char *to, const char *text)
{
	while (*text)
		*to++ = *text++;
	return to;
}

static char *put_number(char *to, u64 number, unsigned int base)
{
	char digits[20];
	int n = 0;

	do
		digits[n++] = "0123456789abcdef"[number % base];
	while (number /= base);
	while (n)
		*to++ = digits[--n];
	return to;
}

static void line(const char *what, const char *name, int count, u64 first, u64 second, int base)
{
	char text[160], *end = put_text(text, "PF ");

	end = put_text(end, what);
	if (name) {
		*end++ = ' ';
		end = put_text(end, name);
	}
	if (count > 0) {
		*end++ = ' ';
		end = put_number(end, first, count == 1 ? base : 10);
	}
	if (count > 1) {
		*end++ = ' ';
		end = put_number(end, second, base);
	}
	*end++ = '\n';
	write(1, text, end - text);
}

#define SAY(what) line(what, NULL, 0, 0, 0, 10)
#define SAY1(what, a) line(what, NULL, 1, a, 0, 10)
#define SAY2(what, a, b) line(what, NULL, 2, a, b, 10)
#define CHECK(name, a) line("check", name, 1, a, 0, 16)
#define FAIL(name) line("FAIL", name, 0, 0, 0, 10)

/* ---- What nolibc lacks ---- */

static u64 clock_ns(int clock)
{
	struct timespec t;

	my_syscall2(__NR_clock_gettime, clock, &t);
	return t.tv_sec * 1000000000UL + t.tv_nsec;
}

static u64 now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

static void sleep_us(long us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	my_syscall4(__NR_clock_nanosleep, CLOCK_MONOTONIC, 0, &t, NULL);
}

static int cpus(void)
{
	u64 mask[16] = { 0 };
	long bytes = my_syscall3(__NR_sched_getaffinity, 0, sizeof(mask), mask);
	int n = 0;

	for (long i = 0; i < bytes / 8; i++)
		for (int b = 0; b < 64; b++)
			n += mask[i] >> b & 1;
	return n;
}

static u64 *map(u64 bytes, int protection, int flags)
{
	u64 *at = mmap(NULL, bytes, protection, flags | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED) {
		FAIL("mmap");
		exit(1);
	}
	return at;
}

#define PRIVATE_MAP(bytes) map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE)

static int protect(void *at, u64 bytes, int protection)
{
	return my_syscall3(__NR_mprotect, at, bytes, protection);
}

/* ---- What differs between processors ---- */

#ifdef __riscv

#define RETURN 0x8067

static u64 load_u64(const void *at)
{
	u64 value;

	asm volatile("ld %0, (%1)" : "=r"(value) : "r"(at) : "memory");
	return value;
}

static void store_u32(void *at, u32 value)
{
	asm volatile("sw %0, (%1)" : : "r"(value), "r"(at) : "memory");
}

/* Writes a function that returns `value`. */
static void write_code(u32 *code, long value)
{
	code[0] = (u32)value << 20 | 0x513; /* addi a0, zero, value */
	code[1] = RETURN;
	/* Instruction caches of all harts. */
	my_syscall3(259, code, code + 2, 0);
}

/*
 * One round is these 13 instructions; the benchmark runs the same in a bare guest. They write the
 * 2 KiB of `table`. Returns the random number of the last round.
 */
static u64 random_rounds(u64 *table, u64 rounds)
{
	u64 x = 88172645463325252UL, t, v;

	asm volatile("1: slli %[t], %[x], 13\n"
		     "xor %[x], %[x], %[t]\n"
		     "srli %[t], %[x], 7\n"
		     "xor %[x], %[x], %[t]\n"
		     "slli %[t], %[x], 17\n"
		     "xor %[x], %[x], %[t]\n"
		     "andi %[t], %[x], 0x7f8\n"
		     "add %[t], %[t], %[table]\n"
		     "ld %[v], (%[t])\n"
		     "add %[v], %[v], %[x]\n"
		     "sd %[v], (%[t])\n"
		     "addi %[n], %[n], -1\n"
		     "bnez %[n], 1b\n"
		     : [x] "+&r"(x), [n] "+&r"(rounds), [t] "=&r"(t), [v] "=&r"(v)
		     : [table] "r"(table) : "memory");
	return x;
}

/*
 * A thread that shares all memory, runs run(argument) and ends. The child's registers are the
 * parent's, except for its stack and the result.
 */
static long thread(void (*run)(long), long argument)
{
	/* Calls come first: they would overwrite the registers. */
	long stack = (long)PRIVATE_MAP(64 * 1024) + 64 * 1024;
	/* VM, FS, FILES, SIGHAND, THREAD, SYSVSEM */
	register long a0 asm("a0") = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000;
	register long a1 asm("a1") = stack;
	register long a2 asm("a2") = 0, a3 asm("a3") = 0, a4 asm("a4") = 0;
	register long a7 asm("a7") = __NR_clone;
	register void (*s2)(long) asm("s2") = run;
	register long s3 asm("s3") = argument;

	asm volatile("ecall\n"
		     "bnez a0, 1f\n"
		     "mv a0, s3\n"
		     "jalr s2\n"
		     "li a0, 0\n"
		     "li a7, 93\n" /* exit, of this thread */
		     "ecall\n"
		     "1:\n"
		     : "+r"(a0) : "r"(a1), "r"(a2), "r"(a3), "r"(a4), "r"(a7), "r"(s2), "r"(s3)
		     : "memory", "ra");
	return a0;
}

#else /* x86-64: the same results */

#define RETURN 0xc3

static u64 load_u64(const void *at)
{
	u64 value;

	asm volatile("mov (%1), %0" : "=r"(value) : "r"(at) : "memory");
	return value;
}

static void store_u32(void *at, u32 value)
{
	asm volatile("mov %0, (%1)" : : "r"(value), "r"(at) : "memory");
}

static void write_code(u32 *code, long value)
{
	code[0] = 0xb8 | (u32)value << 8; /* mov $value, %eax */
	code[1] = (u32)value >> 24 | RETURN << 8;
	asm volatile("" : : : "memory");
}

static u64 random_rounds(u64 *table, u64 rounds)
{
	u64 x = 88172645463325252UL;

	while (rounds--) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		table[x % 2048 / 8] += x;
	}
	return x;
}

static long thread(void (*run)(long), long argument)
{
	long stack = (long)PRIVATE_MAP(64 * 1024) + 64 * 1024;
	/* VM, FS, FILES, SIGHAND, THREAD, SYSVSEM */
	long flags = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000;
	long result = __NR_clone;
	register long r10 asm("r10") = 0, r8 asm("r8") = 0;
	register void (*r12)(long) asm("r12") = run;
	register long r13 asm("r13") = argument;

	asm volatile("syscall\n"
		     "test %%rax, %%rax\n"
		     "jnz 1f\n"
		     "mov %%r13, %%rdi\n"
		     "call *%%r12\n"
		     "xor %%edi, %%edi\n"
		     "mov $60, %%eax\n" /* exit, of this thread */
		     "syscall\n"
		     "1:\n"
		     : "+a"(result)
		     : "D"(flags), "S"(stack), "d"(0L), "r"(r10), "r"(r8), "r"(r12), "r"(r13)
		     : "memory", "rcx", "r11");
	return result;
}

#endif

/* ---- Processes and modules ---- */

static void child(void (*run)(void))
{
	int pid = fork();

	if (pid == 0) {
		run();
		exit(0);
	}
	if (pid < 0)
		FAIL("fork");
}

static int insert(const char *path, const char *options)
{
	int fd = open(path, O_RDONLY), result;

	result = my_syscall3(__NR_finit_module, fd, options, 0);
	close(fd);
	return result;
}

/* The modules that the archive lists, in that order. */
static void insert_listed(void)
{
	static char list[1024];
	char *name = list, *end;
	int fd = open("/modules/list", O_RDONLY), modules = 0;

	if (fd < 0)
		return;
	read(fd, list, sizeof(list) - 1);
	close(fd);
	for (; (end = strchr(name, '\n')); name = end + 1) {
		char path[80];

		*end = 0;
		*put_text(put_text(path, "/modules/"), name) = 0;
		if (insert(path, ""))
			FAIL(name);
		else
			modules++;
	}
	SAY1("modules", modules);
}

/* ---- MD5 (RFC 1321) ---- */

static const u32 md5_add[64] = {
	0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
	0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
	0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
	0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
	0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
	0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
	0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
	0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
};
static const unsigned char md5_turn[16] = { 7, 12, 17, 22, 5, 9, 14, 20, 4, 11, 16, 23, 6, 10, 15, 21 };

static void md5_block(u32 *state, const u32 *block)
{
	u32 a = state[0], b = state[1], c = state[2], d = state[3];

	for (int i = 0; i < 64; i++) {
		u32 f, turn = md5_turn[i / 16 * 4 + i % 4], word;

		if (i < 16)
			f = (b & c) | (~b & d), word = i;
		else if (i < 32)
			f = (d & b) | (~d & c), word = (5 * i + 1) % 16;
		else if (i < 48)
			f = b ^ c ^ d, word = (3 * i + 5) % 16;
		else
			f = c ^ (b | ~d), word = 7 * i % 16;
		f += a + md5_add[i] + block[word];
		a = d, d = c, c = b;
		b += f << turn | f >> (32 - turn);
	}
	state[0] += a, state[1] += b, state[2] += c, state[3] += d;
}

static const u32 md5_start[4] = { 0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476 };

/* Adds the length to the sum of whole blocks. Returns the first eight bytes. */
static u64 md5_end(u32 *state, u64 bytes)
{
	u32 last[16] = { 0x80 };

	last[14] = bytes << 3;
	last[15] = bytes >> 29;
	md5_block(state, last);
	return state[0] | (u64)state[1] << 32;
}

/* ---- A tree of files ---- */

#define FOLDERS 4
#define FILES 16
#define FILE_BYTES (32 * 1024UL)

static const char *tree = "/tmp";

static void path_of(char *path, int folder, int file)
{
	path = put_number(put_text(put_text(path, tree), "/d"), folder, 10);
	if (file >= 0)
		path = put_number(put_text(path, "/f"), file, 10);
	*path = 0;
}

static void write_tree(void)
{
	static u64 data[FILE_BYTES / 8];
	char path[40];
	u64 x = 1;

	for (int folder = 0; folder < FOLDERS; folder++) {
		path_of(path, folder, -1);
		mkdir(path, 0755);
		for (int file = 0; file < FILES; file++) {
			int fd;

			for (u64 i = 0; i < FILE_BYTES / 8; i++)
				data[i] = x = x * 6364136223846793005UL + 1442695040888963407UL;
			path_of(path, folder, file);
			fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
			if (fd < 0 || write(fd, data, FILE_BYTES) != (long)FILE_BYTES)
				FAIL("write of a file");
			if (strcmp(tree, "/tmp") && my_syscall1(__NR_fsync, fd))
				FAIL("fsync of a file");
			close(fd);
		}
	}
}

/* The MD5 sum of all files, read by their names. */
static u64 sum_tree(void)
{
	static u32 data[1024];
	u32 state[4] = { md5_start[0], md5_start[1], md5_start[2], md5_start[3] };
	u64 bytes = 0;
	char path[40];

	for (int folder = 0; folder < FOLDERS; folder++)
		for (int file = 0; file < FILES; file++) {
			long got;
			int fd;

			path_of(path, folder, file);
			fd = open(path, O_RDONLY);
			/* 4: POSIX_FADV_DONTNEED. What is on disk is read from there. */
			my_syscall4(__NR_fadvise64, fd, 0, 0, 4);
			while ((got = read(fd, data, sizeof(data))) == sizeof(data)) {
				for (u64 i = 0; i < sizeof(data) / 4; i += 16)
					md5_block(state, data + i);
				bytes += got;
			}
			if (got != 0)
				FAIL("read of a file");
			close(fd);
		}
	return md5_end(state, bytes);
}

/* ---- Work with one result ---- */

/* Returns the random number of the last round, plus what the rounds have written. */
static u64 loop(u64 rounds)
{
	static u64 table[256] __attribute__((aligned(4096)));
	u64 sum = random_rounds(table, rounds);

	for (int i = 0; i < 256; i++)
		sum += table[i];
	return sum;
}

static u64 fork_each(int times, int executes)
{
	u64 start = now_ns();

	for (int i = 0; i < times; i++) {
		int status = -1, pid = fork();

		if (pid == 0) {
			char *words[] = { "/init", "child", NULL };

			if (executes)
				execve("/init", words, NULL);
			exit(7);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid || WEXITSTATUS(status) != 7)
			FAIL("fork or exec");
	}
	return (now_ns() - start) / times;
}

static u64 pipe_each(int times)
{
	int to[2], from[2];
	char c = 0;
	u64 start;

	if (my_syscall2(__NR_pipe2, to, 0) || my_syscall2(__NR_pipe2, from, 0))
		FAIL("pipe");
	if (fork() == 0) {
		for (int i = 0; i < times && read(to[0], &c, 1) == 1; i++) {
			c++;
			write(from[1], &c, 1);
		}
		exit(0);
	}
	start = now_ns();
	for (int i = 0; i < times; i++) {
		char sent = i;

		write(to[1], &sent, 1);
		if (read(from[0], &c, 1) != 1 || c != (char)(sent + 1))
			FAIL("pipe");
	}
	start = now_ns() - start;
	waitpid(-1, NULL, 0);
	for (int i = 0; i < 2; i++) {
		close(to[i]);
		close(from[i]);
	}
	return start / times;
}

/* Writes its number to each new page, and reads all of them again. Returns the time of a page. */
static u64 touch(u64 bytes)
{
	u64 *memory = PRIVATE_MAP(bytes), start = now_ns();

	for (u64 i = 0; i < bytes / 8; i += PAGE / 8)
		memory[i] = i * 0x9e3779b97f4a7c15UL;
	start = now_ns() - start;
	for (u64 i = 0; i < bytes / 8; i += PAGE / 8)
		if (memory[i] != i * 0x9e3779b97f4a7c15UL)
			FAIL("touch");
	munmap(memory, bytes);
	return start / (bytes / PAGE);
}

/* Writes a function that returns `value` and runs it. */
static long written_code(u32 *code, long value)
{
	write_code(code, value);
	return ((long (*)(void))code)();
}

/* What a store does that the protection forbids: the signal that ends the process. */
static u64 signal_of(int protection, int executes)
{
	u32 *page = (u32 *)PRIVATE_MAP(PAGE);
	int status = 0, pid;

	page[0] = RETURN;
	protect(page, PAGE, protection);
	pid = fork();
	if (pid == 0) {
		if (executes)
			((void (*)(void))page)();
		else
			*(volatile u32 *)page = 1;
		exit(0);
	}
	waitpid(pid, &status, 0);
	munmap(page, PAGE);
	return status & 0x7f;
}

static void check(void)
{
	unsigned char *bytes = (unsigned char *)PRIVATE_MAP(2 * PAGE);
	u32 *code = (u32 *)map(PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE);
	u64 sum = 0;

	CHECK("loop", loop(1000000));
	write_tree();
	CHECK("md5-of-a-tree", sum_tree());
	for (int i = 0; i < 100; i++)
		sum = sum * 31 + written_code(code, i);
	CHECK("written-code", sum);
	for (u64 i = 0; i < 2 * PAGE; i++)
		bytes[i] = i * 7;
	CHECK("load-across-pages", load_u64(bytes + PAGE - 3));
	store_u32(bytes + PAGE - 1, 0x11223344);
	CHECK("store-across-pages", *(volatile u64 *)(bytes + PAGE - 8) ^ *(volatile u64 *)(bytes + PAGE));
	CHECK("store-to-read-only", signal_of(PROT_READ, 0));
	CHECK("store-to-none", signal_of(PROT_NONE, 0));
	CHECK("run-without-execute", signal_of(PROT_READ, 1));
	CHECK("run-with-execute", signal_of(PROT_READ | PROT_EXEC, 1));
	fork_each(20, 0);
	fork_each(20, 1);
	pipe_each(100);
	touch(4 * MIB);
	CHECK("processes", 1);
}

static void measure(void)
{
	u64 start, result;

	SAY1("fork", fork_each(200, 0));
	SAY1("exec", fork_each(200, 1));
	SAY1("pipe", pipe_each(2000));
	SAY1("touch", touch(16 * MIB));
	start = now_ns();
	result = loop(LOOP_ROUNDS);
	start = now_ns() - start;
	line("loop", NULL, 2, start, result, 16);
}

/* One round takes about a tenth of a second. */
static void busy(void)
{
	for (u64 n = 1;; n++) {
		fork_each(20, 0);
		fork_each(20, 1);
		pipe_each(200);
		touch(MIB);
		loop(1000000);
		SAY2("busy", now_ns(), n);
	}
}

/* ---- Load for ever ---- */

static u64 load_bytes = 16 * MIB, timer_ms = 1, rest_ms;

static void rest(void)
{
	if (rest_ms)
		sleep_us(rest_ms * 1000);
}

/* Rewrites pages in no order. Checks of each page what it wrote there before. */
static void load(void)
{
	u64 pages = load_bytes / PAGE, x = 1, bad = 0, *memory = PRIVATE_MAP(load_bytes), last = 0;

	for (u64 n = 1;; n++) {
		u64 *page;

		x = x * 6364136223846793005UL + 1442695040888963407UL;
		page = memory + (x >> 33) % pages * (PAGE / 8);
		bad += page[511] != page[0] * 0x9e3779b97f4a7c15UL;
		page[0]++;
		page[511] = page[0] * 0x9e3779b97f4a7c15UL;
		if (n % 1000)
			continue;
		if (now_ns() - last > 200000000) {
			last = now_ns();
			SAY2("load", n, bad);
		}
		rest();
	}
}

static void sums_of(const char *what)
{
	u64 bad = 0, right;

	write_tree();
	right = sum_tree();
	for (u64 n = 1;; n++) {
		bad += sum_tree() != right;
		line(what, NULL, 2, n, bad, 10);
		/* New files each time, so that the pages of the cache change. */
		write_tree();
		rest();
	}
}

static void sums(void)
{
	sums_of("md5");
}

static void mount_dev(void)
{
	mkdir("/dev", 0755);
	if (mount("dev", "/dev", "devtmpfs", 0, NULL))
		FAIL("mount of /dev");
}

static void disk(void)
{
	mkdir("/disk", 0755);
	mount_dev();
	if (mount("/dev/vda", "/disk", "ext4", 0, NULL)) {
		FAIL("mount of the disk");
		return;
	}
	tree = "/disk";
	sums_of("disk");
}

/* The kernel's struct ifreq and struct sockaddr_in. The address and the port are big-endian. */
struct interface {
	char name[16];
	unsigned short family, port;
	unsigned char address[4];
	char rest[16];
};

static void configure(int fd, int request, unsigned char *address)
{
	struct interface eth0 = { .name = "eth0", .family = 2 };

	if (address)
		memcpy(eth0.address, address, 4);
	else
		eth0.family = 0x41; /* IFF_UP, IFF_RUNNING */
	if (my_syscall3(__NR_ioctl, fd, request, &eth0))
		FAIL("ioctl of eth0");
}

/* All bytes, or the stream has ended. */
static void transfer(int fd, char *block, long bytes, int out)
{
	for (long done = 0; done < bytes;) {
		long got = out ? write(fd, block + done, bytes - done)
			       : read(fd, block + done, bytes - done);

		if (got <= 0) {
			FAIL("the stream broke");
			exit(1);
		}
		done += got;
	}
}

static unsigned short net_port;

static void net(void)
{
	static u64 block[128], back[128];
	unsigned char here[4] = { 10, 77, 0, 2 }, mask[4] = { 255, 255, 255, 0 };
	struct interface there = { .family = 2, .port = net_port, .address = { 10, 77, 0, 1 } };
	int fd = my_syscall3(__NR_socket, 2, 1, 0); /* AF_INET, SOCK_STREAM */
	u64 word = 0, bad = 0;

	configure(fd, 0x8916, here); /* SIOCSIFADDR */
	configure(fd, 0x891c, mask); /* SIOCSIFNETMASK */
	configure(fd, 0x8914, NULL); /* SIOCSIFFLAGS */
	if (my_syscall3(__NR_connect, fd, &there.family, 16)) {
		FAIL("connect to the echo server");
		return;
	}
	for (u64 n = 1;; n++) {
		for (int i = 1; i < 128; i++)
			block[i] = word++;
		/* The server compares it with its own. */
		block[0] = clock_ns(CLOCK_REALTIME);
		transfer(fd, (char *)block, sizeof(block), 1);
		transfer(fd, (char *)back, sizeof(back), 0);
		bad += memcmp(block, back, sizeof(block)) != 0;
		if (n % 8 == 0)
			SAY2("net", n, bad);
		rest();
	}
}

static void tick(void)
{
	u64 last = now_ns(), said = last, gap = 0, last_real = 0;

	for (;;) {
		u64 t, real;

		sleep_us(timer_ms * 1000);
		t = now_ns();
		real = clock_ns(CLOCK_REALTIME);
		if (t < last)
			FAIL("the clock went back");
		if (real < last_real)
			FAIL("the real-time clock went back");
		last_real = real;
		if (t - last > gap)
			gap = t - last;
		last = t;
		if (t - said >= 100000000) {
			SAY2("tick", t, gap);
			said = t;
			gap = 0;
		}
	}
}

/* ---- Storms ---- */

static int storms(void)
{
	return !__atomic_load_n(&shared->stop, __ATOMIC_ACQUIRE);
}

static void count(u64 *what)
{
	__atomic_fetch_add(what, 1, __ATOMIC_RELAXED);
}

static void wrong(void)
{
	count(&shared->wrong);
}

static void storm_of_execs(void)
{
	while (storms()) {
		fork_each(1, 1);
		count(&shared->execs);
	}
}

/* Maps, writes, protects, checks and unmaps, beside other threads of the same memory. */
static void storm_of_maps(long seed)
{
	u64 x = seed * 2 + 1;

	while (storms()) {
		u64 pages, *at;

		x = x * 6364136223846793005UL + 1442695040888963407UL;
		pages = 1 + (x >> 40) % 64;
		at = PRIVATE_MAP(pages * PAGE);
		for (u64 i = 0; i < pages; i++) {
			if (at[i * 512])
				wrong();
			at[i * 512] = x + i;
		}
		if (protect(at, pages * PAGE, PROT_READ))
			wrong();
		for (u64 i = 0; i < pages; i++)
			if (at[i * 512] != x + i)
				wrong();
		if (protect(at, pages * PAGE, PROT_READ | PROT_WRITE))
			wrong();
		at[0] = 0;
		munmap(at, pages * PAGE);
		count(&shared->maps);
	}
}

static void storm_of_code(long seed)
{
	u32 *code = (u32 *)map(PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE);

	for (long n = seed; storms(); n++) {
		if (written_code(code + n % 128 * 8, n & 0x7ff) != (n & 0x7ff))
			wrong();
		count(&shared->codes);
	}
}

/* A process with two threads of each kind for each processor. It ends with all of them. */
static void storm_of_threads(void)
{
	int n = 2 * cpus();

	for (long i = 0; i < n; i++)
		if (thread(storm_of_maps, i) < 0 || thread(storm_of_code, i) < 0)
			FAIL("clone");
	while (storms())
		sleep_us(10000);
	sleep_us(300000);
}

static void storm(u64 seconds)
{
	int n = cpus();

	for (int i = 0; i < n; i++)
		child(storm_of_execs);
	child(storm_of_threads);
	for (u64 i = 0; i < seconds * 10 && !shared->wrong; i++)
		sleep_us(100000);
	__atomic_store_n(&shared->stop, 1, __ATOMIC_RELEASE);
	while (waitpid(-1, NULL, 0) > 0)
		;
	line("storm", "execs", 1, shared->execs, 0, 10);
	line("storm", "maps", 1, shared->maps, 0, 10);
	line("storm", "codes", 1, shared->codes, 0, 10);
	if (shared->wrong)
		FAIL("storm");
}

/* ---- Reads of a disk ---- */

/* One read at a time. */
static void reader(long seed)
{
	int fd = open("/dev/vda", O_RDONLY | 0x4000); /* O_DIRECT */
	u64 blocks = lseek(fd, 0, SEEK_END) / PAGE, x = seed, *block = PRIVATE_MAP(PAGE);

	if (fd < 0 || blocks == 0) {
		FAIL("open of /dev/vda");
		return;
	}
	while (storms()) {
		x = x * 6364136223846793005UL + 1442695040888963407UL;
		if (my_syscall4(__NR_pread64, fd, block, PAGE, (x >> 33) % blocks * PAGE) != PAGE)
			wrong();
		count(&shared->reads);
	}
}

/* CPUID always leaves the guest, for KVM itself. */
static void time_exits(void)
{
#ifdef __x86_64__
	u64 start = now_ns();

	for (u64 i = 0; i < EXITS; i++) {
		u32 a = 0, b, c = 0, d;

		asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
	}
	SAY1("exit", (now_ns() - start) / EXITS);
#endif
}

static void reads(u64 seconds)
{
	u64 start, before;

	time_exits();
	mount_dev();
	for (long i = 0; i < 32; i++)
		if (fork() == 0) {
			reader(i);
			exit(0);
		}
	sleep_us(500000);
	start = now_ns();
	before = shared->reads;
	sleep_us(seconds * 1000000);
	SAY2("reads", now_ns() - start, shared->reads - before);
	__atomic_store_n(&shared->stop, 1, __ATOMIC_RELEASE);
	while (waitpid(-1, NULL, 0) > 0)
		;
	if (shared->wrong)
		FAIL("read of a block");
}

/* ---- The kernel's torture tests ---- */

/* Whether the kernel's log has this text. */
static int logged(const char *text)
{
	static char log[1 << 18];
	long bytes = my_syscall3(__NR_syslog, 3, log, sizeof(log));
	long size = strlen(text);

	for (long i = 0; i + size <= bytes; i++)
		if (memcmp(log + i, text, size) == 0)
			return 1;
	return 0;
}

static void torture_one(const char *name, const char *path, const char *options, const char *success,
			u64 seconds)
{
	if (insert(path, options)) {
		FAIL(name);
		return;
	}
	sleep_us(seconds * 1000000);
	if (my_syscall2(__NR_delete_module, name, 0))
		FAIL(name);
	line("torture", name, 1, logged(success), 0, 16);
}

static void torture(u64 seconds)
{
	if (insert("/torture.ko", ""))
		FAIL("torture.ko");
	torture_one("rcutorture", "/rcutorture.ko", "stat_interval=5 onoff_interval=0",
		    "rcu-torture:--- End of test: SUCCESS", seconds);
	torture_one("locktorture", "/locktorture.ko", "stat_interval=5 torture_type=spin_lock",
		    "spin_lock-torture:--- End of test: SUCCESS", seconds);
	if (logged("rcu: INFO") || logged("BUG:") || logged("WARNING:"))
		FAIL("the kernel has complained");
}

/* ---- */

static u64 number(const char *text, u64 otherwise)
{
	return text ? strtoul(text, NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
	const char *work = getenv("pf");
	u64 seconds = number(getenv("pf_seconds"), 5);

	if (argc > 1 && strcmp(argv[1], "child") == 0)
		return 7;
	SAY1("up", now_ns());
	mkdir("/tmp", 0755);
	mount("tmp", "/tmp", "tmpfs", 0, NULL);
	insert_listed();
	load_bytes = number(getenv("pf_mib"), load_bytes / MIB) * MIB;
	timer_ms = number(getenv("pf_timer_ms"), timer_ms);
	rest_ms = number(getenv("pf_rest_ms"), 0);
	shared = (struct shared *)map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED);
	if (work && strcmp(work, "load") == 0) {
		child(load);
		child(sums);
		if (number(getenv("pf_disk"), 0))
			child(disk);
		net_port = number(getenv("pf_net"), 0);
		net_port = net_port << 8 | net_port >> 8;
		if (net_port)
			child(net);
		tick();
	} else if (work && strcmp(work, "measure") == 0) {
		measure();
	} else if (work && strcmp(work, "busy") == 0) {
		busy();
	} else if (work && strcmp(work, "storm") == 0) {
		storm(seconds);
	} else if (work && strcmp(work, "torture") == 0) {
		torture(seconds);
	} else if (work && strcmp(work, "reads") == 0) {
		reads(seconds);
	} else {
		check();
	}
	SAY("done");
	reboot(LINUX_REBOOT_CMD_POWER_OFF);
	return 0;
}
