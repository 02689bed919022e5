use pageferry_addr::*; use pageferry_memslot::*; use std::collections::BTreeMap; use std::time::Instant; use std::hint::black_box;
fn rng(s:&mut u64)->u64{*s^=*s<<13;*s^=*s>>7;*s^=*s<<17;*s}
fn req(id:u16,gfn:u64,pages:u64,hva:u64)->Request<u64>{Request{address_space:0,id,gpa:Gpa(gfn<<12),size:pages<<12,hva:Hva(hva<<12),flags:SlotFlags::EMPTY,userfault_bitmap:None,data:gfn}}
fn main(){
  let mut s=88172645463325252u64;
  for round in 0..20 {
    let span=[20u64,100,1000,20000][round%4]; let ids=[8u64,40,400,5000][round%4];
    let mut w=SlotWriter::<u64>::new(Limits::default());
    let mut m:BTreeMap<u16,(u64,u64,u64)>=BTreeMap::new();
    for step in 0..20000u64 {
      let id=(rng(&mut s)%ids) as u16;
      let r=rng(&mut s)%4;
      if r==0 { let _=w.set(Request::delete(0,id)); m.remove(&id); }
      else { let (g,p,h)=(rng(&mut s)%span, 1+rng(&mut s)%5, rng(&mut s)%span+1);
        let (p,h)=if let Some(&(_,op,oh))=m.get(&id){(op,oh)}else{(p,h)};
        let free=!m.iter().any(|(&i,&(a,b,_))| i!=id && g<a+b && a<g+p);
        let same=m.get(&id).is_some_and(|x|x.0==g);
        match w.set(req(id,g,p,h)) { Ok(_)=>{assert!(free||same);m.insert(id,(g,p,h));} Err(_)=>assert!(!free) }
      }
      if step%(1+span/10)==0 {
        let v=w.view();
        assert_eq!(v.iter().count(), m.len()); assert_eq!(w.len(),m.len());
        for g in (0..span+6).step_by(1+span as usize/50){ let e=m.iter().find(|&(_,&(a,b,_))|a<=g&&g<a+b).map(|(&i,_)|i); assert_eq!(v.lookup(Gfn(g)).map(|s|s.id),e);
          let mut e:Vec<_>=m.iter().filter(|&(_,&(_,b,h))|h<g+3&&g<h+b).map(|(&i,&(_,_,h))|(h,i)).collect(); e.sort();
          let got:Vec<_>=v.iter_hva(Hva(g<<12)..Hva((g+3)<<12)).map(|s|(s.hva.0>>12,s.id)).collect(); assert_eq!(e,got);
          let mut e:Vec<_>=m.iter().filter(|&(_,&(a,b,_))|a<g+7&&g<a+b).map(|(&i,&(a,_,_))|(a,i)).collect(); e.sort();
          let got:Vec<_>=v.iter_gfn(GfnRange::new(Gfn(g),7).unwrap()).map(|s|(s.range.start().0,s.id)).collect(); assert_eq!(e,got);
        }
        for i in 0..ids as u16 { assert_eq!(v.by_id(i).map(|s|s.range.start().0), m.get(&i).map(|x|x.0)); }
      }
    }
    println!("round {round} ok {} slots, {} B/slot, retired {}", m.len(), if m.len()>0 {w.metadata_bytes()/m.len()} else {0}, w.retired());
    w.reclaim(); assert_eq!(w.retired(),0);
  }
  println!("empty {}", SlotWriter::<u64>::new(Limits::default()).metadata_bytes());
  for n in [10u64,509,32764] {
    let t=Instant::now(); let mut w=SlotWriter::<u64>::new(Limits{max_slots:32767,..Limits::default()});
    for i in 0..n { w.set(req(i as u16,i*8,4,0x10000+i*8)).unwrap(); }
    println!("{n}: setup {:?} {} B/slot", t.elapsed(), w.metadata_bytes()/n as usize);
    let mut r=w.table().reader();
    let keys:Vec<u64>=(0..1<<16).map(|_| (rng(&mut s)%n)*8+rng(&mut s)%4).collect();
    for _ in 0..3 { let t=Instant::now(); for &k in &keys { black_box(r.pin().lookup(Gfn(k)).unwrap().hva); } print!("pin+lookup {:.1} ", t.elapsed().as_nanos() as f64/65536.); 
     let g=r.pin(); let t=Instant::now(); for &k in &keys { black_box(g.lookup(Gfn(k)).unwrap().hva); } print!("lookup {:.1} ", t.elapsed().as_nanos() as f64/65536.); 
     let t=Instant::now(); for &k in &keys { black_box(g.lookup(Gfn(black_box(8)+(k&3))).unwrap().hva); } print!("last {:.2} ", t.elapsed().as_nanos() as f64/65536.); 
     let t=Instant::now(); for &k in &keys { black_box(g.view().lookup(Gfn(k)).unwrap().hva); } print!("view {:.1} ", t.elapsed().as_nanos() as f64/65536.); 
     let t=Instant::now(); for &k in &keys { let h=Hva((0x10000+k)<<12); black_box(g.view().iter_hva(h..Hva(h.0+1)).next().unwrap().hva); } print!("hva {:.1} ", t.elapsed().as_nanos() as f64/65536.); 
     let t=Instant::now(); for &k in &keys { black_box(g.view().by_id((k/8) as u16).unwrap().hva); } println!("id {:.1} ", t.elapsed().as_nanos() as f64/65536.); }
    let starts:Vec<u64>=(0..n).map(|i|i*8).collect(); let pay:Vec<(u64,u64)>=(0..n).map(|i|(i*8+4,i)).collect();
    for _ in 0..2 { let t=Instant::now(); for &k in &keys { let i=starts.partition_point(|&x|x<=k)-1; let p=&pay[i]; assert!(k<p.0); black_box(p.1); } println!("floor {:.1}", t.elapsed().as_nanos() as f64/65536.); }
    for _ in 0..3 {
      let ids:Vec<u16>=(0..1<<14).map(|_|(rng(&mut s)%n) as u16).collect();
      let t=Instant::now(); for &i in &ids { w.set(Request::delete(0,i)).unwrap(); w.set(req(i,i as u64*8,4,0x10000+i as u64*8)).unwrap(); } print!("del+add {:.1} ", t.elapsed().as_nanos() as f64/16384.);
      let t=Instant::now(); for &i in &ids { w.set(req(i,i as u64*8+400000,4,0x10000+i as u64*8)).unwrap(); w.set(req(i,i as u64*8,4,0x10000+i as u64*8)).unwrap(); } println!("move(2) {:.1} retired {} {} B/slot", t.elapsed().as_nanos() as f64/16384., w.retired(), w.metadata_bytes()/n as usize);
    }
  }
}
