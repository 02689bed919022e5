// A guest of one vCPU that checks its memory for ever. Firecracker and Cloud Hypervisor boot it by
// PVH.
//
// It says on the serial port, in lines of less than 80 bytes:
//   READY                          all pages are written
//   tick N sweeps S wrong W        twenty times a second of its clock
//   WRONG page P version V         the first 20 of them
//   BEHIND                         the versions are not those that it has written
//
// Each page has a version, which its contents are made of. A sweep goes over all pages in order:
// each is checked, and one in three is rewritten with the next version.
//
// The work runs in ring 3: a KVM without two-dimensional paging may emulate ring 0.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;

enum { PAGES = 4096, WORDS = 512, PAGES_AT_ONCE = 16, PAUSE_NS = 1000000, TICK_NS = 50000000 };

static u64 pages[PAGES][WORDS] __attribute__((aligned(4096)));
static u32 versions[PAGES];

// The page that the hypervisor writes, by the MSR of kvmclock. Loading a VM touches it first.
struct clock {
    u32 version, pad;
    u64 tsc, ns;
    u32 mul;
    signed char shift;
    u8 flags, rest[2];
};
volatile struct clock clock __attribute__((aligned(4096)));

// From the 32-bit entry to ring 3 in 64-bit mode, with 1 GiB of memory mapped onto itself.
asm(".section .note.pvh, \"a\", @note\n"
    ".balign 4\n"
    ".long 4, 4, 18\n"
    ".asciz \"Xen\"\n"
    ".long _start\n"
    ".bss\n"
    ".balign 4096\n"
    "pml4: .skip 4096\n"
    "pdpt: .skip 4096\n"
    "pd: .skip 4096\n"
    ".skip 16384\n"
    "stack:\n"
    ".data\n"
    ".balign 8\n"
    "gdt: .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00affb000000ffff, 0x00cff3000000ffff\n"
    "task: .quad 0x0000890000000000 + segment_end - segment - 1, 0\n"
    "gdtr: .word . - gdt - 1\n"
    ".long gdt, 0\n"
    // Its map lets ring 3 use all ports below 0x400.
    "segment: .skip 102\n"
    ".word 104\n"
    ".skip 128\n"
    ".byte 0xff\n"
    "segment_end:\n"
    ".text\n"
    ".code32\n"
    ".globl _start\n"
    "_start:\n"
    "movl $pdpt + 7, pml4\n"
    "movl $pd + 7, pdpt\n"
    "xorl %ecx, %ecx\n"
    "1: movl %ecx, %eax\n"
    "shll $21, %eax\n"
    "orl $0x87, %eax\n"
    "movl %eax, pd(, %ecx, 8)\n"
    "incl %ecx\n"
    "cmpl $512, %ecx\n"
    "jb 1b\n"
    "movl $0x4b564d01, %ecx\n"
    "movl $clock + 1, %eax\n"
    "xorl %edx, %edx\n"
    "wrmsr\n"
    "movl $pml4, %eax\n"
    "movl %eax, %cr3\n"
    "movl %cr4, %eax\n"
    "orl $0x20, %eax\n"
    "movl %eax, %cr4\n"
    "movl $0xc0000080, %ecx\n"
    "rdmsr\n"
    "orl $0x100, %eax\n"
    "wrmsr\n"
    "movl %cr0, %eax\n"
    "orl $0x80000000, %eax\n"
    "movl %eax, %cr0\n"
    "movl $segment, %eax\n"
    "movw %ax, task + 2\n"
    "shrl $16, %eax\n"
    "movb %al, task + 4\n"
    "movb %ah, task + 7\n"
    "lgdt gdtr\n"
    "ljmp $8, $2f\n"
    ".code64\n"
    "2: movl $0x23, %eax\n"
    "movl %eax, %ds\n"
    "movl %eax, %es\n"
    "movl $task - gdt, %eax\n"
    "ltr %ax\n"
    "movl $stack, %esp\n"
    "pushq $0x23\n"
    "pushq $stack\n"
    "pushq $2\n"
    "pushq $0x1b\n"
    "pushq $work\n"
    "iretq\n");

static void put(const char *text) {
    for (; *text; text++)
        asm volatile("outb %0, %1" ::"a"(*text), "d"((unsigned short)0x3f8));
}

static void number(const char *before, u64 value) {
    char digits[24];
    char *at = digits + sizeof digits - 1;
    *at = 0;
    do
        *--at = '0' + value % 10;
    while (value /= 10);
    put(before);
    put(at);
}

// Nanoseconds by kvmclock. An odd or changed version means that the hypervisor wrote meanwhile.
static u64 now(void) {
    u32 version, low, high;
    u64 ns;
    do {
        version = clock.version;
        asm volatile("lfence; rdtsc" : "=a"(low), "=d"(high)::"memory");
        u64 passed = (low | (u64)high << 32) - clock.tsc;
        passed = clock.shift < 0 ? passed >> -clock.shift : passed << clock.shift;
        ns = clock.ns + (u64)((unsigned __int128)passed * clock.mul >> 32);
        asm volatile("" ::: "memory");
    } while (version & 1 || version != clock.version);
    return ns;
}

static u64 word(u64 page, u64 version, u64 index) {
    u64 x = page * 0x9e3779b97f4a7c15 + version * 0xc2b2ae3d27d4eb4f + index;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9;
    return x ^ x >> 29;
}

static void fill(u64 page) {
    for (u64 i = 0; i < WORDS; i++)
        pages[page][i] = word(page, versions[page], i);
}

static int is_right(u64 page) {
    for (u64 i = 0; i < WORDS; i++)
        if (pages[page][i] != word(page, versions[page], i))
            return 0;
    return 1;
}

__attribute__((used)) static void work(void) {
    u64 page = 0, sweeps = 0, wrong = 0, ticks = 0, writes = 0, sum = 0;
    for (u64 each = 0; each < PAGES; each++)
        fill(each);
    put("READY\n");
    u64 next = now(), tick = next;
    for (;;) {
        u64 time = now();
        // A clock that is set back costs one pause, not the time by which it was set.
        if (time < next && next - time <= PAUSE_NS) {
            asm volatile("pause");
            continue;
        }
        next = time + PAUSE_NS;
        for (int i = 0; i < PAGES_AT_ONCE; i++) {
            if (!is_right(page)) {
                wrong++;
                if (wrong <= 20) {
                    number("WRONG page ", page);
                    number(" version ", versions[page]);
                    put("\n");
                }
                fill(page);
            }
            sum += versions[page];
            if ((page + sweeps) % 3 == 0) {
                versions[page]++;
                writes++;
                sum++;
                fill(page);
            }
            if (++page == PAGES) {
                // Old pages with their old versions look right one by one.
                if (sum != writes) {
                    put("BEHIND\n");
                    wrong++;
                    writes = sum;
                }
                page = sum = 0;
                sweeps++;
            }
        }
        if (time - tick >= TICK_NS) {
            tick = time;
            number("tick ", ++ticks);
            number(" sweeps ", sweeps);
            number(" wrong ", wrong);
            put("\n");
        }
    }
}
