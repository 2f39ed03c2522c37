import torch, sys, time, warnings
import piecewise_backend as pw
from examples.llama import *
from examples import engine
pw.register_splitting_op("example::paged_attention")
from piecewise_backend.session import Session
from piecewise_backend import _torch
with torch.no_grad():
    for name, over in (("tiny",{}),("1b",dict(num_layers=32,hidden_size=1024,num_heads=16,num_kv_heads=8,intermediate_size=4096,vocab_size=1024))):
        cfg=LlamaConfig.preset(name,**over); m=Llama(cfg,device="cuda",dtype=torch.bfloat16,seed=0)
        cache=cfg.new_cache(num_blocks=512,max_seqs=64,max_blocks_per_seq=64,block_size=16,device="cuda",dtype=torch.bfloat16); m.attach(cache)
        for comp in ("eager","inductor"):
            torch._dynamo.reset()
            c=torch.compile(m,backend="piecewise",fullgraph=True,options={"compiler":comp,"dump_dir":"/tmp/dump","cudagraph_capture_sizes":[1,2,4,8,16,64]})
            t=time.time()
            try:
                r=pw.warmup(c,lambda d: engine.scratch_inputs(d.num_tokens,cache,cfg.vocab_size))
            except Exception:
                import traceback; traceback.print_exc(); continue
            print(name,comp,"warmup",round(time.time()-t,2)); 
            print("\n".join(str(r).splitlines()[-16:]))
            for n in (1,8,5,64,3,1,33,70,0):
                a=engine.scratch_inputs(n,cache,cfg.vocab_size)
                try:
                    x=c(*a).float(); y=m(*a).float()
                    print(n, tuple(x.shape), float((x-y).abs().max()/y.abs().max().clamp(min=1e-6)) if n else "")
                except Exception as e: print(n,"ERR",type(e),str(e)[:300])
            a=engine.scratch_inputs(1,cache,cfg.vocab_size)
            rt=Session.of(_torch.scope_of(c)).runtimes[0]
            def t(f,k=200):
                for _ in range(10): f()
                torch.cuda.synchronize(); s=time.perf_counter()
                for _ in range(k): f()
                torch.cuda.synchronize(); return (time.perf_counter()-s)/k*1e3
            print("eager",t(lambda: m(*a),30),"ours",t(lambda: c(*a)))
            print(pw.report(c).graphs[0].fallbacks, torch.cuda.memory_reserved()>>20)
