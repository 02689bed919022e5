//! A serial port of a PC (16550), on a [`Console`].
//!
//! The registers are those of `vm-superio`. Bytes that the guest sends go to the console. Bytes
//! that are typed there come when the port's queue of 64 bytes has room, with an interrupt.
//!
//! A UART has no way to say "later" that Linux's console driver heeds. So a guest waits for a
//! console that takes no more, for [`PATIENCE`] at most. Behind that, the byte is lost.

use pageferry_machine::{Apply, Console, Device, Interrupt, MachineError};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};

/// The longest wait for a console that is full, of which somebody reads.
const PATIENCE: Duration = Duration::from_millis(20);
/// The registers of a state, before the bytes that the guest has not read.
const REGISTERS: usize = 9;
const FIFO_BYTES: usize = 64;

type Registers = Serial<Edge, NoEvents, Output>;

/// See the module.
pub struct SerialPort {
    registers: Mutex<Registers>,
    line: Arc<Line>,
    console: Arc<Console>,
}

/// The interrupt line, which a paused device keeps to itself.
struct Line {
    interrupt: Arc<dyn Interrupt>,
    is_paused: AtomicBool,
    is_due: AtomicBool,
}

struct Edge(Arc<Line>);

impl Trigger for Edge {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        // `resume` clears the one flag and then reads the other, so one of the two raises.
        self.0.is_due.store(true, Ordering::SeqCst);
        if !self.0.is_paused.load(Ordering::SeqCst) {
            self.0.raise();
        }
        Ok(())
    }
}

impl Line {
    fn raise(&self) {
        if self.is_due.swap(false, Ordering::SeqCst) {
            self.interrupt.raise();
        }
    }
}

/// The guest's output.
struct Output(Arc<Console>);

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let taken = self.0.write(bytes);
            if taken > 0 || Instant::now() >= deadline {
                return Ok(taken.max(1));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SerialPort {
    /// The number of its I/O ports.
    pub const PORTS: u16 = 8;

    /// A port on `console`, which interrupts its guest by `interrupt`.
    #[must_use]
    pub fn new(console: Arc<Console>, interrupt: Arc<dyn Interrupt>) -> Arc<Self> {
        let line = Arc::new(Line {
            interrupt,
            is_paused: AtomicBool::new(false),
            is_due: AtomicBool::new(false),
        });
        let port = Arc::new(Self {
            registers: Mutex::new(Serial::new(
                Edge(Arc::clone(&line)),
                Output(Arc::clone(&console)),
            )),
            line,
            console: Arc::clone(&console),
        });
        let told: Weak<Self> = Arc::downgrade(&port);
        console.tell(move || {
            if let Some(port) = told.upgrade() {
                port.take_input(&mut port.registers());
            }
        });
        port
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes as much of what was typed as there is room for.
    fn take_input(&self, registers: &mut Registers) {
        if self.line.is_paused.load(Ordering::SeqCst) {
            return;
        }
        let room = registers.fifo_capacity();
        let taken = self.console.give_input(room, |typed| {
            if typed.is_empty() {
                return Ok(());
            }
            registers.enqueue_raw_bytes(typed).map(drop)
        });
        // In loop-back mode the port takes none, and the bytes stay with the console.
        drop(taken);
    }

    /// Reads a register. Registers beyond the eighth read ones.
    #[must_use]
    pub fn read(&self, register: u16) -> u8 {
        let Some(register) = offset(register) else {
            return u8::MAX;
        };
        let mut registers = self.registers();
        let value = registers.read(register);
        self.take_input(&mut registers);
        value
    }

    /// Writes a register. Those beyond the eighth do nothing.
    pub fn write(&self, register: u16, value: u8) {
        if let Some(register) = offset(register) {
            // The output never fails, and neither does the interrupt.
            let _ = self.registers().write(register, value);
        }
    }
}

fn offset(register: u16) -> Option<u8> {
    (register < SerialPort::PORTS).then_some(register as u8)
}

/// The state: nine registers of one byte each, and what the guest has not read, at most 64 bytes.
impl Device for SerialPort {
    fn name(&self) -> &str {
        "uart.0"
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        self.line.is_paused.store(true, Ordering::SeqCst);
        // Another thread that had the lock is through.
        drop(self.registers());
        Ok(())
    }

    fn resume(&self) {
        self.line.is_paused.store(false, Ordering::SeqCst);
        self.line.raise();
        self.take_input(&mut self.registers());
    }

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        let state = self.registers().state();
        let mut bytes = vec![
            state.baud_divisor_low,
            state.baud_divisor_high,
            state.interrupt_enable,
            state.interrupt_identification,
            state.line_control,
            state.line_status,
            state.modem_control,
            state.modem_status,
            state.scratch,
        ];
        bytes.extend(state.in_buffer);
        Ok(bytes)
    }

    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        let Some((registers, typed)) = bytes
            .split_first_chunk::<REGISTERS>()
            .filter(|(_, typed)| typed.len() <= FIFO_BYTES)
        else {
            return Err(MachineError::Device(format!(
                "{} bytes for a serial port, expected {REGISTERS} to {}",
                bytes.len(),
                REGISTERS + FIFO_BYTES
            )));
        };
        let state = SerialState {
            baud_divisor_low: registers[0],
            baud_divisor_high: registers[1],
            interrupt_enable: registers[2],
            interrupt_identification: registers[3],
            line_control: registers[4],
            line_status: registers[5],
            modem_control: registers[6],
            modem_status: registers[7],
            scratch: registers[8],
            in_buffer: typed.to_vec(),
        };
        Ok(Box::new(move || {
            let output = Output(Arc::clone(&self.console));
            // The length is checked. An interrupt that was pending waits for `resume`.
            if let Ok(moved) =
                Serial::from_state(&state, Edge(Arc::clone(&self.line)), NoEvents, output)
            {
                *self.registers() = moved;
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Interrupt for Count {
        fn raise(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn port() -> (Arc<Console>, Arc<Count>, Arc<SerialPort>) {
        let (console, count) = (Arc::new(Console::default()), Arc::new(Count::default()));
        let port = SerialPort::new(Arc::clone(&console), Arc::clone(&count) as _);
        (console, count, port)
    }

    const DATA: u16 = 0;
    const ENABLE: u16 = 1;
    const LINE_STATUS: u16 = 5;
    const READY: u8 = 1;

    #[test]
    fn text_goes_out_and_typed_bytes_come_in_with_an_interrupt() {
        let (console, count, port) = port();
        for byte in *b"login: " {
            port.write(DATA, byte);
        }
        assert_eq!(console.read(Duration::ZERO), b"login: ");
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        port.write(ENABLE, 1);
        // More than the port's queue.
        let typed: Vec<u8> = (0..200).collect();
        assert_eq!(console.send(&typed), 200);
        assert!(count.0.load(Ordering::SeqCst) > 0);
        let mut read = Vec::new();
        while port.read(LINE_STATUS) & READY != 0 {
            read.push(port.read(DATA));
        }
        assert_eq!(read, typed);
    }

    #[test]
    fn a_byte_that_was_typed_and_its_interrupt_travel() {
        let (console, here, source) = port();
        source.write(ENABLE, 1);
        console.send(b"y");
        assert_eq!(here.0.load(Ordering::SeqCst), 1);
        source.pause().unwrap();
        console.send(b"z");
        let state = source.save().unwrap();
        let (_, there, destination) = port();
        destination.pause().unwrap();
        destination.decode(1, &state).unwrap()();
        assert_eq!(there.0.load(Ordering::SeqCst), 0, "it is paused");
        destination.resume();
        assert_eq!(there.0.load(Ordering::SeqCst), 1);
        assert_eq!(destination.read(DATA), b'y');
        // A source that takes the VM back goes on.
        source.resume();
        assert_eq!(source.read(DATA), b'y');
        assert_eq!(source.read(DATA), b'z');
    }

    #[test]
    fn a_console_that_nobody_reads_any_more_costs_bytes_and_no_guest() {
        let (console, _, port) = port();
        let _ = console.read(Duration::ZERO);
        while console.write(&[0; 1000]) > 0 {}
        let begin = Instant::now();
        port.write(DATA, b'x');
        assert!(begin.elapsed() >= PATIENCE);
        assert!(!console.read(Duration::ZERO).contains(&b'x'));
    }

    #[test]
    fn registers_and_states_that_do_not_exist_are_harmless() {
        let (_, _, port) = port();
        for register in 0..u16::MAX {
            let _ = port.read(register);
            port.write(register, 0xff);
        }
        let why = |bytes: &[u8]| port.decode(1, bytes).err().unwrap().to_string();
        assert!(why(&[0; 8]).contains("8 bytes for a serial port, expected 9 to 73"));
        assert!(why(&[0; 74]).contains("74 bytes"));
        // Any registers will do.
        port.decode(1, &[0xff; 73]).unwrap()();
        port.resume();
        for register in 0..SerialPort::PORTS {
            let _ = port.read(register);
        }
    }
}
