import json, os, random, statistics, sys, time, itertools
import torch, triton, triton.language as tl
from lightkv.triton_kernels import tuning, decode_attention as da, decode_plan as dp
OUT=os.environ.get("OUT",".")
dev="cuda"
torch.manual_seed(0)
def skew(n, mean, seed):
    r=random.Random(seed); return [max(16,int(r.lognormvariate(0,1.2)*mean/2.05)) for _ in range(n)]
ROWS={
 "B1x1k":(32,8,[1024]),"B1x8k":(32,8,[8192]),"B1x128k":(32,8,[131072]),"B8x4k":(32,8,[4096]*8),"B32x1k":(32,8,[1024]*32),
 "B64x8k":(32,8,[8192]*64),"B256x2k":(32,8,[2048]*256),"B64skew":(32,8,skew(64,4096,1)),"B16skew":(32,8,skew(16,8192,3)),
 "64/8 B64x4k":(64,8,[4096]*64),"32/32 B32x4k":(32,32,[4096]*32),"8/1 B64x8k":(8,1,[8192]*64)}
REACH={"B1x1k":7,"B1x8k":13,"B1x128k":126,"B8x4k":35,"B32x1k":34,"B64x8k":480,"B256x2k":482,"B64skew":186,"B16skew":127,"64/8 B64x4k":243,"32/32 B32x4k":482,"8/1 B64x8k":65}
def make(heads, kvh, lengths, D=128, dtype=torch.bfloat16):
    total=sum(lengths); n=total+1
    buf=torch.empty(n,2*kvh,D,dtype=dtype,device=dev)
    buf.normal_()
    perm=(torch.randperm(total,device=dev)+1).int()
    index=torch.zeros(len(lengths)+1,max(lengths),dtype=torch.int32,device=dev)
    at=0
    for i,l in enumerate(lengths):
        index[i+1,:l]=perm[at:at+l]; at+=l
    rows=torch.arange(1,len(lengths)+1,device=dev)
    return torch.randn(len(lengths),heads,D,dtype=dtype,device=dev),buf[:,:kvh],buf[:,kvh:],index,rows,torch.tensor(lengths,dtype=torch.int32,device=dev)
flush=torch.zeros(64*1024*1024,dtype=torch.int32,device=dev)
def bench(fn,n=20):
    s=torch.cuda.Stream()
    with torch.cuda.stream(s):
        fn(); fn()
    torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): fn()
    g.replay(); torch.cuda.synchronize()
    ts=[]
    for _ in range(n):
        flush.sum()
        a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)*1e3)
    return statistics.median(ts)
@triton.jit
def _empty(x): pass
x=torch.zeros(1,device=dev)
res={"empty":bench(lambda:_empty[(1,)](x))}
print("empty",res["empty"],flush=True)
# correctness
def check(lengths,heads=32,kvh=8,nq=1,window=0,softcap=0.0,D=128):
    q,k,v,index,rows,lens=make(heads,kvh,lengths,D)
    q=torch.randn(len(lengths)*nq,heads,D,dtype=torch.bfloat16,device=dev)
    out=torch.full_like(q,float("nan")); lse=torch.full(q.shape[:2],float("nan"),device=dev)
    kw=dict(scale=D**-.5,window=window,softcap=softcap,num_queries=nq)
    da.decode_attention(q,k,v,index,rows,lens,out=out,lse=lse,**kw)
    ref=da.decode_attention_reference(q,k,v,index,rows,lens,**kw)
    err=(out.float()-ref.float()).abs().max().item()
    assert err<1.6e-2 and not torch.isnan(lse).any(),(lengths,nq,window,err)
    return err
errs=[check([1,64,63,1300,17]),check([5000,3,100],nq=4),check([5000,3,100],nq=8),check([900,2000],window=300),check([900,2000],window=300,nq=3),check(skew(40,2000,7)),check([700]*3,64,8),check([700]*3,32,32),check([700]*5,8,1),check([700,33],28,4,softcap=20.0)]
print("errors",errs,flush=True)
DL=tuning.DecodeLaunch
@triton.jit
def _sum(x, out, n, B: tl.constexpr, K: tl.constexpr):
    pid=tl.program_id(0); acc=tl.zeros([B],tl.float32)
    for i in range(pid*B, n, B*K): acc+=tl.load(x+i+tl.arange(0,B)).to(tl.float32)
    tl.store(out+pid*B+tl.arange(0,B),acc)
big=torch.ones(1<<30,dtype=torch.bfloat16,device=dev); so=torch.zeros(132*8*4096,device=dev)
t=bench(lambda:_sum[(132*8,)](big,so,1<<30,B=4096,K=132*8,num_warps=8)); res["read_TBps"]=2*(1<<30)/(t-res["empty"])/1e6
print("read TB/s",res["read_TBps"]); del big
LAUNCHES=[(32,2,3),(32,4,3),(64,2,3),(64,4,3),(16,2,3),(16,4,3)]
table={}
t0=time.time()
only=sys.argv[1:]
for name,(h,kvh,lengths) in ROWS.items():
    if only and name not in only: continue
    q,k,v,index,rows,lens=make(h,kvh,lengths)
    out=torch.empty_like(q); found={}
    bytes_=2*sum(lengths)*kvh*128*2; floor=res["empty"]+bytes_/res["read_TBps"]/1e6
    def one(bn,w,st,waves,cp,cw,unit):
        key=f"{bn},{w},{st} x{waves} c{cp},{cw} u{unit}"
        if key in found: return found[key]
        tuning.decode_launch=lambda *_:DL(bn,w,st,cp,cw)
        tuning.DECODE_WAVES=waves; tuning.DECODE_UNIT=unit
        plan=dp.decode_plan(rows,lens,num_kv_heads=kvh)
        try: t=bench(lambda: da.decode_attention(q,k,v,index,rows,lens,scale=128**-.5,out=out,plan=plan),12)
        except Exception as e: print("fail",name,key,str(e)[:100]); t=1e9
        found[key]=t
        return t
    cand=[]
    for (bn,w,st) in LAUNCHES:
        for waves in (1,2,3,4,5,6,8):
            cand.append((one(bn,w,st,waves,8,1,32),bn,w,st,waves))
    cand.sort()
    for _,bn,w,st,_w in cand[:3]:
        for waves in (7,10): cand.append((one(bn,w,st,waves,8,1,32),bn,w,st,waves))
    cand.sort(); _,bn,w,st,wv=cand[0]
    for cp,cw in ((4,1),(16,1),(16,2),(32,4),(8,2)): one(bn,w,st,wv,cp,cw,32)
    one(bn,w,st,wv,8,1,16); one(bn,w,st,wv,8,1,64); one(bn,w,st,wv,8,1,128)
    top=sorted(found.items(),key=lambda i:i[1])[:7]
    bl={}
    for kk,tt in found.items():
        l=kk.split(" ")[0]; bl[l]=min(bl.get(l,1e9),tt)
    print(f"{name:14s} floor {floor:6.1f} reach+1.8 {REACH[name]+1.8:5.1f} best {top[0][1]:6.1f} | "+"; ".join(f"{a} {b:.1f}" for a,b in top)+" || "+" ".join(f"{a}:{b:.1f}" for a,b in bl.items()),f"[{time.time()-t0:.0f}s]",flush=True)
    table[name]={"floor":floor,"found":found,"plan_us":bench(lambda: dp.decode_plan(rows,lens,num_kv_heads=kvh))}
    print("   plan",table[name]["plan_us"])
    del q,k,v,index; torch.cuda.empty_cache()
res["rows"]=table; res["errors"]=errs
json.dump(res,open(f"{OUT}/decode_sweep.json","w"))
